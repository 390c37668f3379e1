"""Ctrl-C: a line in place of a traceback, whatever the process is doing.

It ends imports, raises KeyboardInterrupt where work has to tidy up, ends the process at once where
it has not, and at its second press in any case, also after all is done.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

_SAME_PRESS = 0.3  # seconds within which a launcher may pass on what the terminal has sent already
_LAST_SECONDS = 1.0  # in which last words are found and printed: disks and screens may hang
_leaving = threading.Lock()  # of the thread that prints them; never released
_is_watched = False  # whether a thread listens for signals
_last_words: list[Callable[[], str]] = []


def begin() -> None:
    """Lets Ctrl-C end the process with a line, unless it has been dealt with already.

    For imports, which turn the usual exception into tracebacks of their own.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def take() -> None:
    """Lets Ctrl-C raise KeyboardInterrupt again, for work that has to tidy up.

    A second one ends the process at once. A thread sees to that, since the main thread acts on
    signals only between two lines of Python, not while XLA compiles or a device is waited for.
    """
    global _is_watched
    if _is_watched or signal.getsignal(signal.SIGINT) is not _stop:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # A child's signals are its own.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    _is_watched = True
    threading.Thread(target=_watch_interrupts, args=(reader,), name="signals", daemon=True).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def end_at_once() -> None:
    """Lets Ctrl-C end the process with a line, at once. For work with nothing to tidy up.

    An exception may come where it is printed and lost, such as in a callback of JAX.
    """
    if _is_watched:
        signal.signal(signal.SIGINT, _stop)


def ignore() -> None:
    """Lets the first Ctrl-C do nothing: all is done, and an exception would only spoil the end."""
    if _is_watched:
        signal.signal(signal.SIGINT, _do_nothing)  # SIG_IGN would hide the second from the thread


def say_when_left(words: Callable[[], str]) -> None:
    """Lets a Ctrl-C that ends the process at once add what `words` returns to its line.

    A thread calls it. It may fail or hang, and is then left out.
    """
    _last_words[:] = [words]


def _watch_interrupts(reader: int) -> None:
    """Ends the process at the first or the second SIGINT that `reader` gives."""
    first: float | None = None
    while number := os.read(reader, 1):
        if number[0] != signal.SIGINT:
            continue
        if signal.getsignal(signal.SIGINT) is _stop:  # to which the main thread may not come
            _stop(signal.SIGINT, None)
        now = time.monotonic()
        if first is not None and now - first > _SAME_PRESS:
            _end(f"left at once by a second SIGINT{_find_last_words()}")
        first = now if first is None else first


def _find_last_words() -> str:
    if not _last_words:
        return ""
    found: list[str] = []

    def find() -> None:
        with contextlib.suppress(Exception):  # of any kind: this is the only way to leave
            found.extend(words() for words in _last_words)

    thread = threading.Thread(target=find, daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread starts once the interpreter ends
        thread.start()
        thread.join(_LAST_SECONDS)
    return "".join(found)


def _do_nothing(*_: object) -> None:
    pass


def _stop(*_: object) -> None:
    _end(f"stopped by SIGINT{_find_last_words()}")


def _end(line: str) -> None:
    show_cursor = "\x1b[?25h" if os.isatty(2) else ""  # which a progress bar hides
    try:
        if _leaving.acquire(timeout=_LAST_SECONDS):  # two threads may hear of one press
            os.write(2, f"{show_cursor}{line}\n".encode())
    finally:  # nobody may read it
        os._exit(128 + signal.SIGINT)
