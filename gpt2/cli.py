"""The command line: flags, options by `--config`, and one line for a mistake."""

import faulthandler
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import app, flags
from ml_collections import ConfigDict, config_flags

from gpt2.config.options import (
    OPTIONS,
    Options,
    flatten,
    no_option,
    read_option,
    require_option,
)
from gpt2.config.run import Config, read_options
from gpt2.errors import UserError, exit_on_user_error, run_on_exit
from gpt2.signals import exit_at_interrupt, raise_at_interrupt


@exit_on_user_error()
def run(
    main: Callable[..., int | None],
    define_flags: Callable[[], object] = lambda: None,
    *,
    commands: Sequence[str] = (),
    takes_files: bool = False,
) -> None:
    """Parses the command line, and exits with what `main` returns; a mistake is a line and 2.

    `main` receives the arguments that are no flags: one of `commands`, and then, if the program
    `takes_files`, any number. Without `--config`, options are those of our configs/quickstart.py.
    """
    raise_at_interrupt()
    faulthandler.enable()
    if isinstance(sys.stdout, io.TextIOWrapper):  # which may not know every character
        sys.stdout.reconfigure(errors="replace")
    app.define_help_flags()
    known = set(flags.FLAGS)
    define_flags()
    for name in set(flags.FLAGS) - known:  # which --help shows
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])
    _, *arguments = parse_flags(sys.argv)
    if commands and (not arguments or arguments[0] not in commands):
        raise UserError(f"a command is missing: one of {', '.join(commands)}")
    if len(arguments) > bool(commands) and not takes_files:
        raise UserError(
            f"{arguments[-1]} is not a flag", "Write options as --name=value"
        )
    code = main(*arguments) or 0
    exit_at_interrupt()
    run_on_exit(code, "stopped by a signal" if code else "finished")
    sys.exit(code)


def parse_flags(argv: list[str]) -> list[str]:
    """Parses flags, and returns the program's name and the arguments that are no flags."""
    try:
        arguments = flags.FLAGS.read_flags_from_files(argv[1:])
        is_given = any(re.match("--?config(=|$)", each) for each in arguments)
        if "config" in flags.FLAGS and not is_given:
            # The project's own, whatever lies in this folder; ml_collections looks there, too.
            path = Path(__file__).parents[1] / "configs/quickstart.py"
            argv.insert(1, f"--config={os.path.relpath(path)}")
        for argument in arguments:
            if match := re.match(r"--?(?:no)?config\.", argument):
                name, _, value = argument[match.end() :].partition("=")
                require_option(name, "--config.")
                if value:
                    read_option(name, value)  # absl tells Python's error
        if "--help" in argv and "config" in flags.FLAGS:
            flags.FLAGS([each for each in argv if each != "--help"])
            flag = flags.FLAGS["config"]
            options = flatten(flag.value)
            flag.help += " It has:"
            for name, option in OPTIONS.items():
                flag.help += f"\n{name}={options[name]}  {option.meaning}".rstrip()
            argv = [argv[0], "--help"]
        return flags.FLAGS(argv)
    except SystemExit as end:  # absl ends --help with 1, as if it had failed
        sys.exit(0 if end.code == 1 else end.code)
    except flags.UnrecognizedFlagError as error:
        told = str(error)  # with the nearest flag
        if "config" in flags.FLAGS and "Did you mean" not in told:
            raise no_option(error.flagname, "--config.") from None
        raise UserError(told) from None
    except (flags.Error, TypeError, ValueError) as error:
        raise UserError(str(error).replace("\n", " "), "See --help") from None


def define_config() -> None:
    """Defines `--config=FILE` and its overrides `--config.a.b=v`."""
    try:
        config_flags.DEFINE_config_file(
            "config",
            None,
            "File of options, see configs/, or a run's config.json; if not given, "
            "configs/quickstart.py. --config.group.option=value sets one of them.",
            flag_values=flags.FLAGS,
        )
    except flags.CantOpenFlagFileError as error:  # it looks for FILE
        raise UserError(str(error).removeprefix("ERROR:: ")) from None
    flag = flags.FLAGS["config"]
    flag.parser = _ConfigFileParser()
    flag.default_as_str = None  # for --help: the meaning tells what stands for None


class _ConfigFileParser(flags.ArgumentParser):
    """Reads a config file, or the record of a run."""

    def parse(self, name: str) -> ConfigDict:
        return ConfigDict(read_options(name)).lock()


def parse_config() -> Config:
    """Returns the validated options that `--config` and its overrides give."""
    return Config.from_dict(flags.FLAGS["config"].value)


def config_file() -> str:
    """Returns the path of the config file, as it was given."""
    return config_flags.get_config_filename(flags.FLAGS["config"])


def config_name() -> str:
    """Returns the stem of the config file's name, whatever argument follows."""
    path, _, _ = config_file().partition(".py:")
    return Path(path).stem


def overrides() -> Options:
    """Returns the options that `--config.a.b=v` set, by dotted name."""
    return dict(config_flags.get_override_values(flags.FLAGS["config"]))


def define_run() -> None:
    """Defines the flags of a run: its options, its place and its processes."""
    define_config()
    flags.DEFINE_string(
        "workdir", None, "Where the run lives; runs/<config name> if not given."
    )
    flags.DEFINE_bool(
        "debug", False, "Compile without optimisation: edit, run and print sooner."
    )
    flags.DEFINE_string(
        "coordinator", None, "HOST:PORT of process 0, if several train together."
    )
    flags.DEFINE_integer(
        "num_processes", None, "Number of processes that train.", lower_bound=1
    )
    flags.DEFINE_integer(
        "process_index", None, "Number of this process, from 0.", lower_bound=0
    )
    flags.register_validator(
        "coordinator",
        lambda given: given is None or re.fullmatch(r".+:\d{1,5}", given),
        "it is not HOST:PORT, such as localhost:1234",
    )
    flags.register_multi_flags_validator(
        ["process_index", "num_processes"],
        lambda given: (
            None in given.values() or given["process_index"] < given["num_processes"]
        ),
        "there is no such process, since they count from 0",
    )
