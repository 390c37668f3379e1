"""Ctrl-C: a line in place of a traceback, also where the main thread hears nothing.

It ends imports, and work with nothing to tidy up. Elsewhere the first one raises KeyboardInterrupt,
or asks the loop of a run to stop (gpt2/parallel/stop.py), and a second one leaves at once.
"""

import os
import signal
import sys
import threading
import time

_SAME_PRESS = 0.3  # seconds within which a launcher may pass on what the terminal has sent already
_leaving = threading.Lock()  # of the thread that prints the last line; never released
_is_watched = False  # whether a thread listens for signals
_next_command = ""


def begin() -> None:
    """Lets Ctrl-C end imports, and gives the streams that a shell has closed (`>&-`) a place."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the number: else the next file would
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def take() -> None:
    """Lets Ctrl-C raise KeyboardInterrupt again, and a second one end the process at once.

    A thread sees to that, since the main thread acts on signals only between two lines of Python,
    not while XLA compiles or a device is waited for.
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


def end_at_once(next_command: str = "") -> None:
    """Lets Ctrl-C end the process with a line, which says what the next command will do.

    An exception might be lost in a callback of JAX.
    """
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
        if first is not None and time.monotonic() - first > _SAME_PRESS:
            _end(f"left at once by a second {signum.name}", signum)
        first = first or time.monotonic()


def _stop(*_: object) -> None:
    _end("stopped by SIGINT", signal.SIGINT)


def _end(line: str, signum: signal.Signals) -> None:
    show_cursor = "\x1b[?25h" if os.isatty(2) else ""  # which a progress bar hides
    told = f"{line}; {_next_command}" if _next_command else line
    try:
        if _leaving.acquire(timeout=1):  # two threads may hear of one press
            os.write(2, f"{show_cursor}{told}\n".encode())
    finally:  # nobody may read it
        os._exit(128 + signum)
