"""The error for mistakes that a user can mend, the checks that raise it, and warnings."""

import contextlib
import difflib
import errno
import functools
import math
import os
import select
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

# What Python raises where a file is no JSON, or holds values of other types than were expected.
MALFORMED = (
    *(OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError),
    RecursionError,
)


class UserError(Exception):
    """A mistake in a command, a config or a file, told in one line.

    Args:
        what: what is wrong, naming the option or file.
        how: how to mend it.
        exit_code: the exit code of the command.

    Attributes:
        what, how: as given, `what` without its full stop, for those who know better how to mend it.
    """

    EXIT_CODE = 2

    def __init__(self, what: str, how: str, exit_code: int = EXIT_CODE):
        self.exit_code, self.what, self.how = exit_code, what.rstrip("."), how
        told = f"{self.what}. {how.rstrip('.')}" + ("" if how[-1] == "?" else ".")
        super().__init__("".join(map(_printable, told)))


def _printable(character: str) -> str:
    """Returns what shows a character in a line: names of files and flags may hold any."""
    return character if character.isprintable() else character.encode("unicode_escape").decode()


class DivergedError(ArithmeticError):
    """A number that a run depends on is not finite.

    Args:
        step: the optimizer step that gave it.
        what: which number.
        before: whether it was computed from the state before the step, not after it.
    """

    def __init__(self, step: int, what: str, *, before: bool):
        self.step, self.before = step, before
        super().__init__(f"{what} not finite at step {step}")


def exit_on_user_error(main: Callable) -> Callable:
    """Wraps a command's main, so that a user's mistake prints one line and sets the exit code.

    A `UserError` prints `error: ...` on stderr, and so does a full disk or a path that the system
    refuses. Ctrl-C exits with 130, as in a shell, and a reader that wants no more, such as `head`,
    with 141 and without a word.
    """

    @functools.wraps(main)
    def wrapped(*args, **kwargs):
        try:
            return main(*args, **kwargs)
        except BrokenPipeError:
            if not _has_lost_its_reader(sys.stdout):
                raise  # another pipe
            with contextlib.suppress(OSError):
                _forget(sys.stdout)
            sys.exit(128 + signal.SIGPIPE)
        except (UserError, OSError, KeyboardInterrupt) as error:
            if not (end := describe_end(error)):
                raise
            message, code = end
            tell(message)
            if isinstance(error, KeyboardInterrupt):
                with unheard(sys.stdout):
                    sys.stdout.flush()
                os._exit(code)  # the usual end crashes where XLA compiles in a thread
            sys.exit(code)

    return wrapped


def describe_end(error: BaseException) -> tuple[str, int] | None:
    """Returns what a command prints that ends by an exception, and its exit code.

    None: the exception is a mistake of the program, and its traceback has to be seen.
    """
    if isinstance(error, OSError):
        error = _describe_os_error(error) or error
    if isinstance(error, UserError):
        return f"error: {error}", error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "stopped by SIGINT", 128 + signal.SIGINT
    return None


@contextlib.contextmanager
def paths_are_checked() -> Iterator[None]:
    """Leaves the body the tracebacks of paths that the system refuses. No person chose them badly.

    Raises:
        RuntimeError: in place of an OSError that `exit_on_user_error` would ascribe to a person.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _OF_PATHS:
            raise
        raise RuntimeError(f"the system has refused what it allowed before: {error}") from error


# What the system refuses because of a path that a person chose.
_OF_PATHS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG),
    *(errno.ELOOP, errno.ENOTDIR, errno.EISDIR),
)


def _describe_os_error(error: OSError) -> UserError | None:
    """Returns the line for what the system refuses, None if no person can mend it."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" of {error.filename}" if error.filename else ""
        return UserError(f"no room is left on the disk{where}", "Make room, and repeat the command")
    if error.errno in _OF_PATHS and error.filename:
        name = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
        return UserError(f"{name}: {error.strerror}", "Give another path, or mend this one")
    return None


def warn(message: str) -> None:
    """Prints what a person should know, in one line on stderr. The program goes on."""
    tell(f"warning: {message}")


def tell(message: str, stream: TextIO | None = None) -> None:
    """Prints a message at once, on stderr unless `stream` is given. It may be lost: `unheard`."""
    stream = stream or sys.stderr
    with unheard(stream):
        print(message, file=stream, flush=True)


@contextlib.contextmanager
def unheard(stream: TextIO) -> Iterator[None]:
    """Lets the body print on `stream`. What cannot be printed is lost, and the program goes on.

    The pipe of a screen may have lost its reader, since Ctrl-C ends `tee` too. The disk of a log
    may be full. What is printed later is tried again.
    """
    try:
        yield
    except OSError:
        with contextlib.suppress(OSError):
            _forget(stream)


def _has_lost_its_reader(stream: TextIO) -> bool:
    poll = select.poll()
    try:
        poll.register(stream, 0)  # the loss of a reader is told in any case
    except (OSError, ValueError, TypeError):  # it is no file
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _forget(stream: TextIO) -> None:
    """Empties a stream's buffer. Python would print it at its end, and fail with exit code 120."""
    number = stream.fileno()
    kept = os.dup(number)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), number)
        try:
            stream.flush()
        finally:
            os.dup2(kept, number)
            os.close(kept)


def unknown_option(name: str, spellings: Mapping[str, str], otherwise: str) -> UserError:
    """Returns the error for an option that does not exist.

    It suggests the most similar one, or the only one that begins so.

    Args:
        name: what the user gave.
        spellings: existing options, by every spelling that a person may use, without dashes.
        otherwise: how to find the option if no spelling is similar.
    """
    given = name.lstrip("-")
    near = difflib.get_close_matches(given, spellings, n=1, cutoff=0.8)
    begun = [spelling for spelling in spellings if spelling.startswith(given)]
    near = near or (begun if len(begun) == 1 else [])
    how = f"Did you mean {spellings[near[0]]}?" if near else otherwise
    return UserError(f"there is no option {name}", how)


def require_choice(
    name: str, value: str, choices: tuple[str, ...], flag: bool = True, usual: str | None = None
) -> None:
    """Raises a UserError unless `value` is one of `choices`.

    Args:
        name: of the config option.
        value: its value.
        choices: what it may be.
        flag: `name` is a config option.
        usual: the choice to propose where none is similar to `value`; the first, if not given.
    """
    if value not in choices:
        cutoff = 0.75 if choices[0] == "auto" else 0.54  # "flash" is not meant as "splash"

        def likeness(choice: str) -> float:
            return difflib.SequenceMatcher(None, choice, str(value).lower()).ratio()

        nearest = max(choices, key=likeness)  # the first of those
        near = nearest if likeness(nearest) >= cutoff else usual or choices[0]
        option = f"--config.{name}={near}" if flag else near
        raise UserError(
            f"{name}={value} is not one of {', '.join(choices)}", f"For example, use {option}"
        )


def require_at_least(name: str, value: float, minimum: float, example: float | None = None) -> None:
    """Raises a UserError unless the config option `name` is at least `minimum`.

    Args:
        name: the option.
        value: its value.
        minimum: the least that is allowed.
        example: a value that works, where the least is no good advice.
    """
    if not value >= minimum:
        how = f"Use --config.{name}={minimum}"
        if example is not None:
            how = f"For example, use --config.{name}={example}"
        raise UserError(f"{name}={value} is below {minimum}", how)


def require_finite(
    name: str, value: float, minimum: float = -math.inf, example: float | None = None
) -> None:
    """Raises a UserError unless the config option `name` is finite and at least `minimum`."""
    if not math.isfinite(value):
        number = next(n for n in (example, minimum, 0) if n is not None and math.isfinite(n))
        raise UserError(
            f"{name}={value} is not a finite number",
            f"For example, use --config.{name}={number}",
        )
    require_at_least(name, value, minimum, example)


def require_positive(name: str, value: float, example: float, flag: bool = False) -> None:
    """Raises a UserError unless `value` is finite and above 0, as `example` is.

    Args:
        name: of the config option, or of the `flag`.
        value: its value.
        example: one that works.
        flag: `name` is not a config option.
    """
    if not 0.0 < value < math.inf:
        dashes = "--" if flag else ""
        how = f"For example, use {dashes or '--config.'}{name}={example}"
        raise UserError(f"{dashes}{name}={value} is not above 0 and finite", how)


def require_fraction(name: str, value: float, example: float = 0.0) -> None:
    """Raises a UserError unless the config option `name` is in [0, 1), as `example` is."""
    if not 0.0 <= value < 1.0:
        how = f"For example, use --config.{name}={example}"
        raise UserError(f"{name}={value} is not in [0, 1)", how)


def require_writable(flag: str, directory: Path) -> None:
    """Raises a UserError unless `directory`, or its nearest existing parent, is writable.

    Tries to write, since permissions do not tell for root or for a disk mounted read-only.
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


def require_writable_file(flag: str, path: Path) -> None:
    """Raises a UserError unless `path` is no directory, and lies where files can be written."""
    require_writable(flag, path.parent)
    if path.is_dir():
        raise UserError(f"--{flag}={path} is a directory", "Give a file")


def require_source(workdir: str | Path | None, hf_directory: str | Path | None) -> None:
    """Raises a UserError unless exactly one source of weights is given."""
    if workdir and hf_directory:
        raise UserError("--workdir and --hf both name weights", "Leave out one")
    if not (workdir or hf_directory):
        raise UserError("there are no weights to load", "Give --workdir or --hf")
