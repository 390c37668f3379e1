"""User errors, exit messages and exit codes of commands, and messages on the screen."""

import contextlib
import difflib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn, TextIO


class UserError(Exception):
    """The error for a mistake that the user can correct.

    The message is one line: `what` states what is wrong, and `remedy` what to do. A command that
    ends with this error exits with `exit_code`.
    """

    def __init__(self, what: str, remedy: str = "", exit_code: int = 2):
        super().__init__(what, remedy, exit_code)
        self.what = what.rstrip(".")
        self.remedy = remedy
        self.exit_code = exit_code
        self.is_located = False  # whether an inner `located` has handled this error

    def __str__(self) -> str:
        message = f"{self.what}. {self.remedy}".rstrip(". ")
        if not message.endswith("?"):
            message += "."
        return printable(message)  # file names and flags may contain control characters


class DivergedError(ArithmeticError):
    """The error raised if the results of a step contain NaN or Inf.

    `what` begins the message, for example "The loss is". `before` is True if NaN or Inf was
    computed from the state before the step (in the loss or the gradients), and False if it was
    computed from the state after the step (in the validation loss).
    """

    def __init__(self, step: int, what: str, *, before: bool):
        self.step = step
        self.before = before
        super().__init__(f"{what} not finite at step {step}")


@contextlib.contextmanager
def located(place: object) -> Iterator[None]:
    """If the body of `with` raises a UserError, write `place` before its message.

    `place` is the file, the line or the option that is wrong. The message does not change if it
    already contains `place`, or if the error has already passed through an inner `located`.
    """
    try:
        yield
    except UserError as error:
        if not error.is_located and str(place) not in error.what:
            error.what = f"{place}: {error.what}"
        error.is_located = True
        raise


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """If the body raises an error that the user can correct, print one line and end the process.

    Use this as a context manager or as a decorator. The user can correct a UserError and, for
    example, a full disk; see `describe_exit`. Ctrl-C ends the process with the exit code 130. If
    the output is a pipe whose reader has ended, such as `head`, the process prints nothing and ends
    with the exit code 141. Other exceptions are raised again.
    """
    try:
        yield
    except BrokenPipeError:
        _discard(sys.stdout)
        sys.exit(128 + signal.SIGPIPE)
    except (Exception, KeyboardInterrupt) as error:
        end = describe_exit(error)
        if end is None:
            raise
        message, code = end
        if isinstance(error, KeyboardInterrupt):
            # sys.exit would crash if a thread were compiling with XLA.
            exit_process(message, code)
        log(message)
        sys.exit(code)


def exit_process(message: str, code: int) -> NoReturn:
    """Print a message, and end this process with the exit code `code`.

    Do not wait for threads or other processes, because they may hang.
    """
    log(message)
    with ignore_failed_output(sys.stdout):
        sys.stdout.flush()
    os._exit(code)


# Errors of the operating system about a disk or a path that the user chose.
_CAUSED_BY_USER = (
    errno.ENOENT,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENOTEMPTY,
)


def describe_exit(error: BaseException) -> tuple[str, int] | None:
    """Return the message and the exit code for a command that ends with the exception `error`.

    Return None if the user cannot correct the error, so that its traceback should be printed.
    """
    if isinstance(error, OSError) and error.errno in _CAUSED_BY_USER:
        message = str(error.strerror)
        # If a rename failed, `filename2` is the target, which the user knows. The file that should
        # have been renamed may be a temporary one.
        if path := error.filename2 or error.filename:
            message += f" ({os.fsdecode(path)})"
        error = UserError(message)
    # JAX raises this error if JAX_PLATFORMS names a platform that is misspelt or not available.
    if str(error).startswith("Unable to initialize backend"):
        error = UserError(str(error))
    if isinstance(error, UserError):
        return f"error: {error}", error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "stopped by SIGINT", 128 + signal.SIGINT
    return None


def printable(text: str) -> str:
    """Escape the control characters of a string. Otherwise a terminal would execute them."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def warn(message: str) -> None:
    """Print a one-line warning to stderr."""
    log(f"warning: {message}")


def log(message: str, stream: TextIO | None = None) -> None:
    """Print a line to `stream`, by default stderr, without buffering.

    If the line cannot be written, ignore this, so that the run continues.
    """
    stream = stream or sys.stderr
    with ignore_failed_output(stream):
        print(message, file=stream, flush=True)


@contextlib.contextmanager
def ignore_failed_output(stream: TextIO) -> Iterator[None]:
    """If the body of `with` cannot write to `stream`, discard the output instead of failing.

    For example, the disk may be full, or Ctrl-C may have ended the `tee` that reads the output.
    """
    try:
        yield
    except OSError:
        _discard(stream)


def _discard(stream: TextIO) -> None:
    """Redirect a stream to /dev/null. Otherwise, Python would fail to flush the stream at exit."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise a UserError that suggests the most similar choice, unless `value` is one of `choices`.

    `name` is the option or argument that has this value. The choices must be in lower case, because
    the search for the most similar choice converts `value` to lower case.
    """
    if value not in choices:
        near = difflib.get_close_matches(value.lower(), choices, n=1)
        remedy = f"Did you mean {near[0]}?" if near else ""
        allowed = ", ".join(choices).removeprefix(", ")
        raise UserError(f"{name}={value} is not one of {allowed}", remedy)
