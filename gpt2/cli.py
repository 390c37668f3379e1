"""The command line: flags, the options of `--config`, and exit codes."""

import faulthandler
import io
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from absl import app, flags
from ml_collections import ConfigDict, config_flags

from gpt2.config.options import (
    DEFAULTS,
    OPTIONS,
    Options,
    flatten,
    no_option,
    read_option,
    require_option,
)
from gpt2.config.run import Config, find_config, read_options
from gpt2.errors import UserError, exit_on_user_error, require_choice
from gpt2.signals import exit_at_interrupt, raise_at_interrupt

# The config file that is read without `--config`. It belongs to this installation, because the
# current directory may contain another file named configs/quickstart.py.
_QUICKSTART = Path(__file__).resolve().parents[1] / "configs/quickstart.py"


@exit_on_user_error()
def run(
    main: Callable[..., int | None],
    define_flags: Callable[[], object] = lambda: None,
    *,
    commands: tuple[str, ...] = (),
    takes_files: bool = False,
) -> None:
    """Parse the command line, call `main`, and exit with the code that `main` returns.

    If `main` returns None, the exit code is 0. `define_flags` defines the program's flags. `main`
    receives the arguments that are not flags: one of `commands`, unless `commands` is empty, and
    then, if `takes_files` is True, any number of files. Any other argument is a UserError. If the
    program has the flag `--config`, but the user does not give it, configs/quickstart.py is read.
    """
    raise_at_interrupt()
    faulthandler.enable()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The encoding of the terminal may lack some characters, which are then printed as `?`.
        sys.stdout.reconfigure(errors="replace")
    app.define_help_flags()
    program = sys.modules["__main__"]
    program.__doc__ = _wrap(program.__doc__ or "")  # the beginning of --help
    known = set(flags.FLAGS)
    define_flags()
    for name in set(flags.FLAGS) - known:  # --help lists only the program's key flags
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])
    _, *arguments = parse_flags(sys.argv, lists_options=define_flags is define_run)
    if commands and not arguments:
        raise UserError(
            "The first argument must be a command",
            f"Choose one of {', '.join(commands)}",
        )
    if commands:
        require_choice("command", arguments[0], commands)
    if len(arguments) > bool(commands) and not takes_files:
        raise UserError(
            f"{arguments[-1]} is not a flag", "Write options as --name=value"
        )
    try:
        code = main(*arguments) or 0
    except SystemExit as end:
        if not end.code:  # Exit code 0 would report a success.
            raise RuntimeError(
                "sys.exit was called before the command was complete. The traceback above shows "
                "the call: remove it, for example from your own function in data.corpus"
            ) from end
        raise
    exit_at_interrupt()
    sys.exit(code)


def _wrap(text: str) -> str:
    """Return `text` wrapped at 80 columns. Indented paragraphs are commands, and do not change."""
    paragraphs = text.split("\n\n")
    for index, paragraph in enumerate(paragraphs):
        if not paragraph.startswith(" "):
            paragraphs[index] = textwrap.fill(paragraph, 80)
    return "\n\n".join(paragraphs) + "\n"


def parse_flags(argv: list[str], *, lists_options: bool = False) -> list[str]:
    """Parse the command line `argv`. Return a list: the program's name and all non-flag arguments.

    With `lists_options`, --help also lists the options of `--config`. Raise a UserError for a flag
    or value that is not allowed.
    """
    try:
        arguments = flags.FLAGS.read_flags_from_files(argv[1:])
        is_given = any(re.match("--?config(=|$)", text) for text in arguments)
        if "config" in flags.FLAGS and not is_given:
            argv.insert(1, f"--config={os.path.relpath(_QUICKSTART)}")
        for argument in arguments:
            if match := re.match(r"--?(?:no)?config\.", argument):
                name, _, value = argument[match.end() :].partition("=")
                require_option(name, "--config.")
                if value:
                    # Checked here, because absl's error message is harder to understand.
                    read_option(name, value)
        # absl prints the help as soon as it reads --help, so --help is moved to the end, after the
        # flags that set the listed values.
        argv.sort(key=lambda argument: argument == "--help")
        parsed = flags.FLAGS(argv)
    except SystemExit as end:  # absl exits with 1 after --help
        if "--help" in argv and lists_options:
            _list_options()
        sys.exit(0 if end.code == 1 else end.code)
    except flags.UnrecognizedFlagError as error:
        raise _unknown_flag(error) from None
    except (flags.Error, TypeError, ValueError) as error:
        # absl names flags that are not set before the message of a validator, with the value None.
        message = re.sub(
            r"^flags (\w+=None(, |: ))+", "", str(error).replace("\n", " ")
        )
        raise UserError(message, "See --help") from None
    for name, value in flags.FLAGS.flag_values_dict().items():
        if isinstance(value, float) and math.isnan(value):
            raise UserError(f"--{name}=nan is not a number", "See --help")
    return parsed


def _list_options() -> None:
    """Print all options that can follow `--config.`, with their values and meanings."""
    print("\nOptions of --config:")
    for name, value in flatten(flags.FLAGS["config"].value).items():
        print(
            textwrap.fill(
                f"  {name}={value}  {OPTIONS[name].help}",
                80,
                subsequent_indent="      ",
            )
        )


def _unknown_flag(error: flags.UnrecognizedFlagError) -> UserError:
    """Return the UserError for absl's error about an unknown flag.

    If the flag is a flag of nanoGPT, or the name of an option without `--config.`, the message
    contains the flag to use instead.
    """
    if error.flagname == "out_dir":
        return UserError("There is no flag --out_dir", "Did you mean --workdir?")
    if error.flagvalue.endswith("=resume"):  # nanoGPT's --init_from=resume
        return UserError(
            f"There is no flag --{error.flagname}",
            "To continue a run, repeat its command with the same --workdir",
        )
    message = str(error)  # may contain absl's suggestion of the nearest flag
    if "config" in flags.FLAGS and "Did you mean" not in message:
        return no_option(error.flagname, "--config.")
    return UserError(message)


def define_config() -> None:
    """Define `--config=FILE` and `--config.GROUP.OPTION=VALUE`, which overrides the file."""
    try:
        config_flags.DEFINE_config_file(
            "config",
            None,
            "A file of options, such as those in configs/, or a run's config.json; "
            "configs/quickstart.py by default. --config.group.option=value sets one option. "
            "`python train.py --help` lists all options.",
            flag_values=flags.FLAGS,
        )
    except flags.CantOpenFlagFileError as error:
        raise UserError(str(error).removeprefix("ERROR:: ")) from None
    flag = flags.FLAGS["config"]
    flag.parser = _ConfigFileParser()
    flag.default_as_str = (
        None  # not shown by --help, because the text above states the default
    )


class _ConfigFileParser(flags.ArgumentParser):
    """The parser of the flag `--config`, which names a config file or the config.json of a run."""

    def parse(self, name: str) -> ConfigDict:
        try:
            return ConfigDict(read_options(name)).lock()
        except SystemExit as end:  # parse_flags would take it for the end of --help
            raise UserError(f"{name} calls sys.exit", "Remove the call") from end


def parse_config() -> Config:
    """Return the options in the file of `--config`, with the overrides on the command line.

    Raise a UserError if they are not allowed. Call this after the flags have been parsed.
    """
    return Config.from_dict(flags.FLAGS["config"].value)


def config_file() -> str:
    """Return the path of the config file, as given on the command line."""
    return config_flags.get_config_filename(flags.FLAGS["config"])


def config_name() -> str:
    """Return the name of the file of `--config`, without folder, suffix and argument.

    For `configs/gpt2_124m.py:v5e-8`, the name is `gpt2_124m`.
    """
    path, _, _ = config_file().partition(".py:")
    return Path(path).stem


def overrides() -> Options:
    """Return the options that the user has set with `--config.GROUP.OPTION=VALUE`.

    The keys are dotted names, `GROUP.OPTION`.
    """
    return dict(config_flags.get_override_values(flags.FLAGS["config"]))


def chosen_options() -> set[str]:
    """Return the dotted names of options that the user has set, on the command line or in a file.

    A value in a config file counts if it differs from configs/default.py. Values in this
    installation's configs/quickstart.py do not count, because this file is read even if the user
    does not give `--config`.
    """
    chosen = set(overrides())
    path, _ = find_config(config_file())
    if path.resolve() != _QUICKSTART:
        defaults = flatten(DEFAULTS)
        for name, value in flatten(flags.FLAGS["config"].value).items():
            if value != defaults[name]:
                chosen.add(name)
    return chosen


def define_cluster() -> None:
    """Define the flag `--cluster`, whose value the program passes to `ray_cluster.connect`."""
    flags.DEFINE_string(
        "cluster",
        "",
        "ray[:ADDRESS]: use the nodes of a Ray cluster to train runs and to encode texts.",
    )


def define_run() -> None:
    """Define the flags of train.py: `--config`, `--workdir`, and three others.

    `--coordinator`, `--num_processes` and `--process_index` are for runs of several processes.
    """
    define_config()
    flags.DEFINE_string(
        "workdir",
        None,
        "Directory or URL of the run; runs/<config name> by default.",
    )
    flags.DEFINE_string(
        "coordinator",
        None,
        "HOST:PORT of process 0, if several processes train together.",
    )
    flags.DEFINE_integer(
        "num_processes", None, "Number of processes that train together.", lower_bound=1
    )
    flags.DEFINE_integer(
        "process_index", None, "Index of this process, from 0.", lower_bound=0
    )
    flags.register_validator(
        "coordinator",
        _is_address,
        "it is not HOST:PORT, such as localhost:1234, with a port from 1 to 65535",
    )
    flags.register_multi_flags_validator(
        ["process_index", "num_processes"],
        lambda given: (
            None in given.values() or given["process_index"] < given["num_processes"]
        ),
        "--process_index counts from 0, and must be less than --num_processes",
    )


def _is_address(text: str | None) -> bool:
    """Return whether a flag's value is valid: HOST:PORT, or None if the flag is not given."""
    if text is None:
        return True
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 1 <= int(port) <= 65535
