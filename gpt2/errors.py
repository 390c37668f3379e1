"""Mistakes that a person can mend, how they end a command, and lines on the screen."""

import contextlib
import difflib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import NoReturn, TextIO

_on_exit = ""  # a command of the shell


class UserError(Exception):
    """A mistake that a person can mend, told in one line: `what` is wrong, and `how` to mend it."""

    def __init__(self, what: str, how: str = "", exit_code: int = 2):
        self.exit_code = exit_code
        self.what = what.rstrip(".")
        told = f"{self.what}. {how}".rstrip(". ")
        if not told.endswith("?"):
            told += "."
        # Names of files and flags may hold any character.
        super().__init__(
            "".join(c if c.isprintable() else ascii(c)[1:-1] for c in told)
        )


class DivergedError(ArithmeticError):
    """`what` is NaN or Inf at a step, computed from the state `before` the step or after it."""

    def __init__(self, step: int, what: str, *, before: bool):
        self.step = step
        self.before = before
        super().__init__(f"{what} not finite at step {step}")


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Ends a command by a user's mistake with one line and an exit code. It decorates, too.

    So does Ctrl-C, with 130. A reader that wants no more, such as `head`, gives 141 and no word.
    """
    try:
        yield
    except BrokenPipeError:
        _silence(sys.stdout)
        sys.exit(128 + signal.SIGPIPE)
    except (Exception, KeyboardInterrupt) as error:
        end = describe_exit(error)
        if end is None:
            run_on_exit(1, f"{type(error).__name__}: {error}")
            raise
        message, code = end
        if isinstance(error, KeyboardInterrupt):
            # sys.exit would crash where XLA compiles in a thread.
            exit_process(message, code)
        log(message)
        run_on_exit(code, message)
        sys.exit(code)


def exit_process(message: str, code: int) -> NoReturn:
    """Ends the process with a line, without waiting for its threads or for other processes."""
    log(message)
    run_on_exit(code, message)
    with ignore_failed_output(sys.stdout):
        sys.stdout.flush()
    os._exit(code)


def set_on_exit(command: str) -> None:
    """Sets what `run_on_exit` runs."""
    global _on_exit
    _on_exit = command


def run_on_exit(code: int, reason: str) -> None:
    """Runs `logging.on_exit`, once. Its failure is told, and changes no exit code."""
    command = _on_exit
    set_on_exit("")
    if not command:
        return
    about = {"GPT2_EXIT_CODE": str(code), "GPT2_EXIT_REASON": reason}
    try:
        subprocess.run(
            command, shell=True, env=os.environ | about, check=True, timeout=60
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        warn(f"logging.on_exit: {error}")


# What the system refuses because of a disk, or of a path that a person chose.
_REFUSED = (
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
)


def describe_exit(error: BaseException) -> tuple[str, int] | None:
    """Returns what a command prints that ends by an exception, and its exit code.

    None: the exception is a mistake of the program, and its traceback has to be seen.
    """
    if isinstance(error, OSError) and error.errno in _REFUSED:
        told = str(error.strerror)
        if error.filename:
            told += f" ({os.fsdecode(error.filename)})"
        error = UserError(told)
    if str(error).startswith("Unable to initialize backend"):  # as JAX_PLATFORMS asks
        error = UserError(str(error))
    if isinstance(error, UserError):
        return f"error: {error}", error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "stopped by SIGINT", 128 + signal.SIGINT
    return None


def warn(message: str) -> None:
    """Prints what a person should know, in one line on stderr. The program goes on."""
    log(f"warning: {message}")


def log(message: str, stream: TextIO | None = None) -> None:
    """Prints a line at once, to stderr unless `stream` is given. A failed write is ignored."""
    stream = stream or sys.stderr
    with ignore_failed_output(stream):
        print(message, file=stream, flush=True)


@contextlib.contextmanager
def ignore_failed_output(stream: TextIO) -> Iterator[None]:
    """Lets the body print, and loses what cannot be: Ctrl-C ends `tee` too, a disk is full."""
    try:
        yield
    except OSError:
        _silence(stream)


def _silence(stream: TextIO) -> None:
    """Lets a stream print nowhere: Python would print its rest at the end, and exit with 120."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises a UserError unless `value` is one of `choices`; it proposes the nearest."""
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        how = f"Did you mean {near[0]}?" if near else ""
        raise UserError(f"{name}={value} is not one of {', '.join(choices)}", how)
