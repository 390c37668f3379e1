"""What every command shares: flags whose mistakes give one line, and settings before JAX starts."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from gpt2.config import Config
from gpt2.errors import UserError, exit_on_user_error, unknown_option


def run(main: Callable[[], int | None]) -> None:
    """Parses flags and calls `main()`; a user's mistake in either is one line and exit code 2."""

    @exit_on_user_error
    def guarded(argv):
        if len(argv) > 1:
            raise UserError(f"{argv[1]} is not a flag", "Write options as --name=value")
        logging.set_verbosity(logging.WARNING)
        _use_compilation_cache()
        try:
            return main()
        except KeyboardInterrupt:
            return 128 + signal.SIGINT

    app.run(guarded, flags_parser=exit_on_user_error(_parse_flags))


def define_config(default: str) -> flags.FlagHolder:
    """Defines `--config=FILE` and its overrides `--config.a.b=v`; `default` is a config file."""
    return config_flags.DEFINE_config_file("config", default, "File of options, see configs/.")


def load_config(holder: flags.FlagHolder) -> Config:
    """Returns the validated options that `--config` and its overrides give."""
    return Config.from_dict(holder.value)


def config_name() -> str:
    """Returns the stem of the config file's name."""
    return Path(config_flags.get_config_filename(flags.FLAGS["config"])).stem


def _parse_flags(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.UnrecognizedFlagError as error:
        option = error.flagname
        if not option.startswith("config."):
            public = [name for name in flags.FLAGS if "." not in name]
            raise unknown_option(f"--{option}", [f"--{name}" for name in public]) from None
        raise _unknown_config_option(option) from None
    except flags.Error as error:
        raise UserError(str(error).replace("\n", " "), "See --help") from None
    except FileNotFoundError as error:
        raise UserError(
            f"--config={error.filename} is no file", "See configs/ for those there are"
        ) from None
    except (AttributeError, KeyError) as error:
        raise UserError(
            str(error).strip("'\""), "See configs/default.py for every option"
        ) from None
    except (TypeError, ValueError) as error:
        raise UserError(str(error).replace("\n", " "), "See configs/default.py for types") from None


def _unknown_config_option(option: str) -> UserError:
    from configs.default import get_config

    valid = [
        f"config.{group}.{name}"
        for group, options in get_config().to_dict().items()
        if isinstance(options, dict)
        for name in options
    ]
    return unknown_option(f"--{option}", [f"--{name}" for name in ["config.seed", *valid]])


def _use_compilation_cache() -> None:
    """Keeps compiled programs between runs, unless JAX was told of another place for them."""
    if jax.config.jax_compilation_cache_dir is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gpt2-jax" / "xla"
        jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
