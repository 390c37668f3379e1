"""Flags, as every command parses them. A mistake in a flag prints one line."""

import io
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

import configs
from gpt2 import interrupts
from gpt2.config import (
    ALIASES,
    DEFAULTS,
    Config,
    check_config_file,
    flatten,
    is_record,
    read_record,
)
from gpt2.errors import UserError, exit_on_user_error, require_source, unknown_option

_arguments: list[str] | None = None  # those that are no flags, once the command line is parsed


@exit_on_user_error
def parse(
    define_flags: Callable[[], object] | None = None,
    check: Callable[..., object] | None = None,
    *,
    default_config: str = "",
    commands: Sequence[str] = (),
    takes_files: bool = False,
) -> None:
    """Parses the command line, for `run`. A mistake prints one line and exits with 2.

    Commands call this ahead of imports that take seconds, so that mistakes and `--help` are
    answered at once.

    Args:
        define_flags: defines flags of the command, unless its module has done so.
        check: raises a UserError for flags that cannot work; it receives what `main` will.
        default_config: the config in configs/ to use without `--config`, for programs that define
            that flag.
        commands: for programs whose first argument is one of these; `main` receives it.
        takes_files: whether `main` receives any number of arguments that are no flags.

    Raises:
        SystemExit: the flags are wrong, which a line has told, or `--help` is printed.
    """
    global _arguments
    if isinstance(sys.stdout, io.TextIOWrapper):  # which may not know every character
        sys.stdout.reconfigure(errors="replace")
    app.define_help_flags()
    known = set(flags.FLAGS)
    if define_flags:
        define_flags()
    for name in set(flags.FLAGS) - known:
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])  # for --help
    argv = sys.argv
    if default_config and not any(re.match("--?config(=|$)", arg) for arg in argv):
        path = Path(configs.__file__).with_name(f"{default_config}.py")
        argv = [argv[0], f"--config={path}", *argv[1:]]
    _, *arguments = _parse_flags(argv)
    if commands and (not arguments or arguments[0] not in commands):
        what = f"{arguments[0]} is not a command" if arguments else "a command is missing"
        raise UserError(what, f"Choose one of {', '.join(commands)}")
    if len(arguments) > bool(commands) and not takes_files:
        raise UserError(f"{arguments[-1]} is not a flag", "Write options as --name=value")
    if check:
        check(*arguments)
    _arguments = arguments


def run(main: Callable[..., int | None]) -> None:
    """Calls `main` with what `parse` left. A user's mistake prints one line and exits with 2.

    Args:
        main: returns the exit code, None for 0.
    """
    if (arguments := _arguments) is None:
        raise RuntimeError("cli.parse comes first")

    @exit_on_user_error
    def guarded(argv: list[str]) -> int | None:
        interrupts.take()
        logging.set_verbosity(logging.FATAL)  # what libraries log, they raise too, or it is no help
        code = main(*argv[1:])
        interrupts.ignore()
        return code

    app.run(guarded, flags_parser=lambda argv: [argv[0], *arguments])


@exit_on_user_error
def define_config() -> None:
    """Defines `--config=FILE` and its overrides `--config.a.b=v`.

    FILE is Python, like those in configs/, or the config.json of a run, to repeat it.
    """
    about = (
        "File of options, see configs/, or a run's config.json; if not given, "
        "configs/quickstart.py. --config.group.option=value sets one of them."
    )
    try:
        config_flags.DEFINE_config_file("config", None, about, flag_values=flags.FLAGS)
    except (flags.Error, OSError, ValueError) as error:  # it reads --flagfile ahead of the others
        raise UserError(str(error).removeprefix("ERROR:: "), "Check --flagfile") from None
    flag = flags.FLAGS["config"]
    flag.parser = _ConfigFileParser(flag.parser)
    flag.default_as_str = None  # for --help: `about` tells what stands for None


def parse_config() -> Config:
    """Returns the validated options that `--config` and its overrides give.

    Raises:
        UserError: there is no `--config`, or its options cannot work.
    """
    options = flags.FLAGS["config"].value
    if options is None:
        raise UserError("there is no --config", "Name a file of options; see configs/")
    _refuse_stale_vocabulary(options)
    return Config.from_dict(options)


def refuse_ignored(name: str, because: str) -> None:
    """Raises a UserError if the flag `name` was given although the program would ignore it."""
    if flags.FLAGS[name].present:
        raise UserError(f"--{name} would be ignored: {because}", f"Leave out --{name}")


def define_source() -> None:
    """Defines the flags of commands that load a model."""
    text = partial(flags.DEFINE_string, flag_values=flags.FLAGS)
    text("workdir", None, "Directory of a run.")
    text("hf", None, "Directory of a Hugging Face model, in place of --workdir.")
    text("checkpoint", "best", "best, latest or a step of the run.")


def check_source() -> None:
    """Raises a UserError unless the flags of `define_source` name one model."""
    require_source(flags.FLAGS.workdir, flags.FLAGS.hf)
    if flags.FLAGS.hf:
        refuse_ignored("checkpoint", "--hf holds a single set of weights")


def config_name() -> str:
    """Returns the stem of the config file's name.

    Raises:
        UserError: the file is the record of a run. All records have one name.
    """
    name = config_file()
    if is_record(name):
        raise UserError(
            f"--config={name} is the record of a run, and names no folder for a new one",
            "Give --workdir",
        )
    return Path(name).stem


def config_file() -> str:
    """Returns the file that `--config` names."""
    return config_flags.get_config_filename(flags.FLAGS["config"])


def overrides() -> dict[str, Any]:
    """Returns the options that `--config.a.b=v` set, by dotted name."""
    return dict(config_flags.get_override_values(flags.FLAGS["config"]))


class _ConfigFileParser(flags.ArgumentParser):
    """Reads a config file, or the record of a run.

    Args:
        python: ml_collections' parser, which reads config files alone.
    """

    def __init__(self, python: flags.ArgumentParser):
        self._python = python

    def parse(self, name: str) -> ConfigDict:
        """Returns the options of the file `name`."""
        if not is_record(name):
            return self._python.parse(name)
        return ConfigDict(read_record(Path(name))).lock()

    def flag_type(self) -> str:
        """Returns what absl calls the value."""
        return self._python.flag_type()


def _refuse_stale_vocabulary(options: ConfigDict) -> None:
    """Raises a UserError for a record's vocabulary beside another tokenizer than the record's.

    A record holds the number of tokens that the run's tokenizer had, and a model may have more.
    """
    given = config_flags.get_override_values(flags.FLAGS["config"])
    if (
        is_record(config_file())
        and "data.tokenizer" in given
        and "model.vocab_size" not in given
        and options.model.vocab_size
    ):
        raise UserError(
            f"model.vocab_size={options.model.vocab_size} of the record belongs to its tokenizer, "
            f"not to data.tokenizer={options.data.tokenizer}",
            "Add --config.model.vocab_size=0",
        )


def _parse_flags(argv: list[str]) -> list[str]:
    options, otherwise = {}, "See --help"
    if "config" in flags.FLAGS:
        options, otherwise = flatten(DEFAULTS.to_dict()), "See configs/default.py and --help"
    spellings = _spellings(options)
    try:
        for name, value in _given(flags.FLAGS.read_flags_from_files(argv[1:]), options):
            if name == "config" and options:
                check_config_file(value)
            elif name.startswith("config.") and options:
                if name.removeprefix("config.") not in options:
                    raise _no_option(name, options, spellings, otherwise)
                option = options[name.removeprefix("config.")]
                _check_type(name, value, _kind(name, options), such_as=option)
            elif name in flags.FLAGS:
                _check_type(name, value, _kind(name, options))
        return flags.FLAGS(argv)
    except SystemExit as end:
        sys.exit(0 if end.code == 1 else end.code)  # absl ends --help with 1, as if it had failed
    except BrokenPipeError:  # of `--help | head`
        raise
    except flags.UnrecognizedFlagError as error:
        spellings |= {name: f"--{name}" for name in flags.FLAGS if "." not in name}
        raise unknown_option(f"--{error.flagname}", spellings, otherwise) from None
    except (flags.Error, OSError, TypeError, ValueError) as error:
        text = str(error).replace("\n", " ")
        if found := re.match(r"Found (--config\.\S+) in argv before a value for --config", text):
            raise UserError(
                f"{found[1]} stands before --config, whose options it changes", "Put --config first"
            ) from None
        raise UserError(text, otherwise if "--config" in text else "See --help") from None


def _no_option(
    name: str, options: dict[str, Any], spellings: dict[str, str], otherwise: str
) -> UserError:
    """Returns the error for a name under `config.` that is no option."""
    group = name.removeprefix("config.")
    if not group:
        return UserError("--config. names no option", otherwise)
    members = [option for option in options if option.startswith(f"{group}.")]
    if members:
        return UserError(
            f"--{name} is a group of options", f"Name one, such as --config.{members[0]}"
        )
    return unknown_option(f"--{name}", spellings, otherwise)


def _given(arguments: list[str], options: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the name and the value of every flag; `True` or `False` for `--flag` and `--noflag`.

    As absl reads them: a flag that is not boolean takes the next argument.

    Raises:
        UserError: that argument is a flag too, which absl would take for the value.
    """
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            return
        if not (match := re.fullmatch(r"--?([\w.]+)(=(.*))?", argument, re.DOTALL)):
            continue
        name, has_value, value = match.groups()
        kind = _kind(name, options)
        if has_value:
            yield name, value
        elif kind == "bool":
            yield name, "True"
        elif not kind and name.startswith("no"):
            yield name.removeprefix("no"), "False"
        elif kind:
            value = next(rest, "")
            if _is_flag(value, options):
                raise UserError(
                    f"--{name} has no value: {value} follows it", f"Write --{name}=VALUE"
                )
            yield name, value
        else:
            yield name, ""


def _is_flag(argument: str, options: dict[str, Any]) -> bool:
    """Returns whether an argument is a flag of this program, in any of its forms."""
    if not (match := re.fullmatch(r"--?([\w.]+)(=.*)?", argument, re.DOTALL)):
        return False
    name = match[1]
    return bool(_kind(name, options) or _kind(name.removeprefix("no"), options) == "bool")


def _kind(name: str, options: dict[str, Any]) -> str:
    """Returns the type of a flag's value, empty if there is no such flag."""
    if (option := name.removeprefix("config.")) != name and option in options:
        return type(options[option]).__name__
    return flags.FLAGS[name].parser.flag_type() if name in flags.FLAGS else ""


# How absl reads a value of each type, and what to give.
_TYPES: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "int": (flags.IntegerParser().convert, "Give a whole number", "1000"),
    "float": (flags.FloatParser().convert, "Give a number", "0.1 or 6e-4"),
    "bool": (flags.BooleanParser().parse, "Give True or False", ""),
}


def _check_type(name: str, value: str, kind: str, such_as: Any = None) -> None:
    """Raises unless a flag's value can be read as its type; `such_as` is a value that works."""
    read, how, example = _TYPES.get(kind, (str, "", ""))
    try:
        read(value)
    except (TypeError, ValueError):
        if example:
            how = f"{how}, such as {example if such_as is None else such_as}"
        raise UserError(f"--{name}={value} is not of type {kind}", how) from None


def _spellings(options: dict[str, Any]) -> dict[str, str]:
    """Maps every spelling that a person may use for an option of the config to the option."""
    spellings = {}
    for name in reversed(options):  # the first of two of one name wins
        last = name.rpartition(".")[2]
        for spelling in (last, f"config.{last}", name, f"config.{name}"):
            spellings[spelling] = f"--config.{name}"
    for alias, name in ALIASES.items():
        for spelling in (alias, f"config.{alias}", f"config.{name.partition('.')[0]}.{alias}"):
            if name in options:
                spellings[spelling] = f"--config.{name}"
    return spellings
