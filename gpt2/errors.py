"""The one kind of error that is the user's to mend, its words, and the checks that raise it."""

import difflib
import functools
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path


class UserError(Exception):
    """A mistake in a command, a config or a file, told in one line.

    Args:
        what: what is wrong, naming the option or file.
        how: how to mend it.
    """

    exit_code = 2

    def __init__(self, what: str, how: str):
        super().__init__(
            f"{what.rstrip('.')}. {how.rstrip('.')}" + ("" if how[-1] in ".?" else ".")
        )


def exit_on_user_error(main: Callable) -> Callable:
    """Wraps a command's main: what its user did becomes a line on stderr and an exit code.

    `error: ...` for a `UserError`, and 130, as of a shell, for Ctrl-C where nothing is to be saved.
    """

    @functools.wraps(main)
    def wrapped(*args, **kwargs):
        try:
            return main(*args, **kwargs)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            print("stopped by SIGINT", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(128 + signal.SIGINT)  # the usual end crashes where XLA compiles in a thread

    return wrapped


def counted(number: int, noun: str) -> str:
    """Writes how many there are: `1 device`, `2,048 devices`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def unknown_option(name: str, spellings: Mapping[str, str], otherwise: str) -> UserError:
    """Returns the error for an option that does not exist, with the one that was meant.

    Args:
        name: what was given.
        spellings: options there are, by all that a person may write for them, dashes left out.
        otherwise: how to find the option if what was given resembles none.
    """
    near = difflib.get_close_matches(name.lstrip("-"), spellings, n=1, cutoff=0.8)
    how = f"Did you mean {spellings[near[0]]}?" if near else otherwise
    return UserError(f"there is no option {name}", how)


def require_choice(name: str, value: str, choices: tuple[str, ...], flag: bool = True) -> None:
    """Raises unless `value` is one of `choices`; `flag`: `name` is a config option."""
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.0)[0]
        option = f"--config.{name}={near}" if flag else near
        raise UserError(f"{name}={value} is none of {', '.join(choices)}", f"Use {option}, for one")


def require_at_least(name: str, value: float, minimum: float) -> None:
    """Raises unless the config option `name` is at least `minimum`."""
    if not value >= minimum:
        raise UserError(f"{name}={value} is below {minimum}", f"Use --config.{name}={minimum}")


def require_fraction(name: str, value: float) -> None:
    """Raises unless the config option `name` is in [0, 1)."""
    if not 0.0 <= value < 1.0:
        raise UserError(f"{name}={value} is not in [0, 1)", f"Use --config.{name}=0.0, for one")


def require_writable(flag: str, directory: Path) -> None:
    """Raises unless files can be written in `directory`, or in the nearest that is above it.

    Tries it, since permissions do not tell: of root, or on a disk that is mounted read-only.
    """
    directory = directory.absolute()
    try:
        nearest = next(path for path in (directory, *directory.parents) if path.exists())
        with tempfile.TemporaryDirectory(dir=nearest, suffix=".tmp"):
            pass
    except OSError as error:
        raise UserError(
            f"nothing can be written in {directory} ({error.strerror})", f"Give another --{flag}"
        ) from error
