"""Mistakes that a person can mend, checks that raise them, lines on the screen, and Ctrl-C."""

import contextlib
import difflib
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO


class UserError(Exception):
    """A mistake that a person can mend, told in one line: `what` is wrong, and `how` to mend it."""

    def __init__(self, what: str, how: str = "", exit_code: int = 2):
        self.exit_code = exit_code
        self.what = what.rstrip(".")
        told = ". ".join(filter(None, [self.what, how.rstrip(".")]))
        told += "" if told.endswith("?") else "."
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
    except (UserError, OSError, KeyboardInterrupt, RuntimeError) as error:
        if not (end := describe_end(error)):
            raise
        message, code = end
        tell(message)
        if isinstance(error, KeyboardInterrupt):
            with unheard(sys.stdout):
                sys.stdout.flush()
            os._exit(code)  # the usual end crashes where XLA compiles in a thread
        sys.exit(code)


# What the system refuses because of a disk, or of a path that a person chose.
_REFUSED = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR),
)


def describe_end(error: BaseException) -> tuple[str, int] | None:
    """Returns what a command prints that ends by an exception, and its exit code.

    None: the exception is a mistake of the program, and its traceback has to be seen.
    """
    if isinstance(error, OSError) and error.errno in _REFUSED:
        where = f" ({os.fsdecode(error.filename)})" if error.filename else ""
        error = UserError(f"{error.strerror}{where}")
    if isinstance(error, RuntimeError) and "Unable to initialize backend" in str(error):
        error = UserError(str(error).splitlines()[0])  # of JAX, for JAX_PLATFORMS
    if isinstance(error, UserError):
        return f"error: {error}", error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "stopped by SIGINT", 128 + signal.SIGINT
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


# Ctrl-C: a line in place of a traceback, also where the main thread hears nothing. It ends imports,
# and work with nothing to tidy up. Elsewhere the first one raises KeyboardInterrupt, or asks the
# loop of a run to stop (gpt2/parallel/stop.py), and a second one leaves at once.

_SAME_PRESS = 0.3  # seconds within which a launcher may pass on what the terminal has sent already
_leaving = threading.Lock()  # of the thread that prints the last line; never released
_is_watched = False  # whether a thread listens for signals
_next_command = ""


def begin_process() -> None:
    """Lets Ctrl-C end imports."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def raise_at_interrupt() -> None:
    """Lets Ctrl-C raise KeyboardInterrupt again, and a second one end the process at once.

    A thread sees to that: the main thread acts on signals only between two lines of Python.
    """
    global _is_watched
    if _is_watched or signal.getsignal(signal.SIGINT) is not _stop:
        return
    _is_watched = True
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # A child's signals are its own.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def leave_at_interrupt(next_command: str = "") -> None:
    """Lets Ctrl-C end the process with a line: an exception might be lost in a callback of JAX."""
    global _next_command
    _next_command = next_command
    if _is_watched:
        signal.signal(signal.SIGINT, _stop)


def _watch(reader: int) -> None:
    """Ends the process at the first SIGINT or the second signal that `reader` gives."""
    first = None
    while number := os.read(reader, 1):
        signum = signal.Signals(number[0])
        if signum not in (signal.SIGINT, signal.SIGTERM):
            continue
        if signal.getsignal(signum) is _stop:  # to which the main thread may not come
            _stop(signum, None)
        if (
            first is None and _next_command
        ):  # a run finishes its step, which may take long
            tell(
                f"{signum.name}: finishing the step, then saving; a second one leaves at once"
            )
        if first is not None and time.monotonic() - first > _SAME_PRESS:
            _leave(f"left at once by a second {signum.name}", signum)
        first = first or time.monotonic()


def _stop(*_: object) -> None:
    _leave("stopped by SIGINT", signal.SIGINT)


def _leave(line: str, signum: signal.Signals) -> None:
    clean = (
        "\r\x1b[K\x1b[?25h" if os.isatty(2) else ""
    )  # of a bar, which hides the cursor
    told = "; ".join(filter(None, [line, _next_command]))
    try:
        if _leaving.acquire(timeout=1):  # two threads may hear of one press
            os.write(2, f"{clean}{told}\n".encode())
    finally:  # nobody may read it
        os._exit(128 + signum)
