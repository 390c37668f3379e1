"""What every command shares: flags whose mistakes give one line, and settings before JAX starts."""

import itertools
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import config_flags

import configs.default
from gpt2.config import Config
from gpt2.errors import UserError, exit_on_user_error, unknown_option


def run(main: Callable[[], int | None], default_config: str = "") -> None:
    """Parses flags and calls `main()`; a user's mistake in either is one line and exit code 2.

    Args:
        main: returns the exit code, None for 0.
        default_config: for commands that define `--config`: which of configs/ to use without it.
    """

    def parse(argv: list[str]) -> list[str]:
        if default_config and not any(re.match("--?config(=|$)", arg) for arg in argv):
            path = Path(configs.__file__).with_name(f"{default_config}.py")
            argv = [argv[0], f"--config={path}", *argv[1:]]
        return _parse_flags(argv)

    @exit_on_user_error
    def guarded(argv: list[str]) -> int | None:
        if len(argv) > 1:
            raise UserError(f"{argv[1]} is not a flag", "Write options as --name=value")
        logging.set_verbosity(logging.ERROR)  # what libraries warn of is not the user's to mend
        _use_compilation_cache()
        return main()

    app.run(guarded, flags_parser=exit_on_user_error(parse))


def define_config() -> flags.FlagHolder:
    """Defines `--config=FILE` and its overrides `--config.a.b=v`."""
    about = "File of options, see configs/. --config.group.option=value sets one of them."
    return config_flags.DEFINE_config_file("config", None, about)


def load_config(holder: flags.FlagHolder) -> Config:
    """Returns the validated options that `--config` and its overrides give."""
    if holder.value is None:
        raise UserError("there is no --config", "Name a file of options, see configs/")
    return Config.from_dict(holder.value)


def refuse_ignored(name: str, because: str) -> None:
    """Raises if the flag `name` was given, which would change nothing."""
    if flags.FLAGS[name].present:
        raise UserError(f"--{name} would be ignored: {because}", f"Leave out --{name}")


def config_name() -> str:
    """Returns the stem of the config file's name."""
    return Path(config_flags.get_config_filename(flags.FLAGS["config"])).stem


def _parse_flags(argv: list[str]) -> list[str]:
    spellings, otherwise = {}, "See --help"
    if "config" in flags.FLAGS:
        spellings, otherwise = _spellings(), "See configs/default.py and --help"
        for arg, following in itertools.pairwise([*argv[1:], ""]):
            option = re.match(r"--?(?:no)?(config\.[^=]+)", arg)
            if option and f"--{option[1]}" not in spellings.values():
                raise unknown_option(f"--{option[1]}", spellings, otherwise)
            if file := re.match("--?config(?:=(.*)|$)", arg):
                _check_config_file(following if file[1] is None else file[1])
    try:
        return flags.FLAGS(argv)
    except SystemExit as end:
        sys.exit(0 if end.code == 1 else end.code)  # absl ends --help with 1, as if it had failed
    except flags.UnrecognizedFlagError as error:
        spellings |= {name: f"--{name}" for name in flags.FLAGS if "." not in name}
        raise unknown_option(f"--{error.flagname}", spellings, otherwise) from None
    except flags.Error as error:
        about = str(error).replace("\n", " ")
        wrong = re.match(r"flag (--([\w.]+)=.*): (invalid lit|could not conv|\('Non-bool)", about)
        if wrong:
            kind = flags.FLAGS[wrong[2]].parser.flag_type()
            raise UserError(f"{wrong[1]} is not of type {kind}", _EXAMPLES[kind]) from None
        raise UserError(about, "See --help") from None
    except (TypeError, ValueError) as error:
        raise UserError(str(error).replace("\n", " "), "See configs/default.py for types") from None


_EXAMPLES = {
    "int": "Give a whole number, as 1000",
    "float": "Give a number, as 0.1 or 6e-4",
    "bool": "Give True or False",
}


def _spellings() -> dict[str, str]:
    """Maps all that a person may write for an option of the config to the option."""
    spellings = {}
    for name in _config_options():
        last = name.rpartition(".")[2]
        for spelling in (last, f"config.{last}", name, f"config.{name}"):
            spellings[spelling] = f"--config.{name}"
    return spellings


# What Python code may raise.
_PROGRAM_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError),
    *(OSError, RuntimeError, SyntaxError, TypeError, ValueError),
)


def _check_config_file(name: str) -> None:
    """Runs a config file, so that its own errors are told apart from those of overrides."""
    if not Path(name).is_file():
        raise UserError(f"--config={name} is no file", "See configs/ for those there are")
    if Path(name).suffix == ".json":
        raise UserError(
            f"--config={name} is the record of a run, not a config",
            "Give a file like configs/quickstart.py; a run continues by the command that began it",
        )
    try:
        runpy.run_path(name)["get_config"]()
    except _PROGRAM_ERRORS as error:
        about = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise UserError(
            f"--config={name} fails ({about})", "Mend the file; configs/ has others to compare"
        ) from error


def _config_options() -> list[str]:
    """Returns the dotted names of all options."""
    names = []
    for name, value in configs.default.get_config().to_dict().items():
        members = value if isinstance(value, dict) else ()
        names += [f"{name}.{member}" for member in members] or [name]
    return names


def _use_compilation_cache() -> None:
    """Keeps compiled programs between runs, unless JAX was told of another place for them."""
    if jax.config.jax_compilation_cache_dir is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gpt2-jax" / "xla"
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
