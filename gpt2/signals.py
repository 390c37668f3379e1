"""Ctrl-C and SIGTERM: a line in place of a traceback, and a run that ends after its step.

Ctrl-C ends imports at once, and work with nothing to tidy up. Elsewhere the first one raises
KeyboardInterrupt, or asks the loop of a run to stop, and a second one leaves at once, also where
the main thread hears nothing.
"""

import os
import queue
import signal
import threading
import time
from types import FrameType
from typing import Self, TypeVar

from gpt2.errors import log, run_on_exit

T = TypeVar("T")

_SAME_PRESS = 0.3  # seconds within which a launcher may pass on what the terminal has sent already
_leaving = threading.Lock()  # of the thread that prints the last line; never released
_is_watched = False  # whether a thread listens for signals
_next_command = ""
_stop_of_run: "StopSignal | None" = None  # of the loop that goes on


def begin_process() -> None:
    """Lets Ctrl-C end imports."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def raise_at_interrupt() -> None:
    """Lets Ctrl-C raise KeyboardInterrupt again, and a second one end the process at once.

    A thread sees to that: the main thread acts on signals only between two lines of Python.
    """
    global _is_watched
    handler = signal.getsignal(signal.SIGINT)
    if _is_watched or handler not in (_stop, signal.SIG_IGN):
        return
    _is_watched = True
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # A child's signals are its own.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True).start()
    if handler is _stop:  # not behind a script's `&`, which ignores SIGINT
        signal.signal(signal.SIGINT, signal.default_int_handler)


def exit_at_interrupt(next_command: str = "") -> None:
    """Lets Ctrl-C end the process with a line: an exception might be lost in a callback of JAX."""
    global _next_command
    _next_command = next_command
    if _is_watched and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _stop)


class Stopped(Exception):
    """A signal that stops the run came while the run waited for text; StopSignal ends it."""


def get_unless_stopped(ready: queue.Queue[T]) -> T:
    """Returns what a thread puts into a queue; Stopped if a signal to this run comes first.

    Of several processes the others would wait for this one, which therefore goes on.
    """
    while True:
        try:
            return ready.get(timeout=0.5)
        except queue.Empty:
            stop = _stop_of_run
            if stop and stop.requested and not stop.agrees:
                raise Stopped from None


class StopSignal:
    """Lets SIGTERM and SIGINT end the loop after its step, the same one in every process.

    A signal to any of several processes stops all. JAX's runtime listens for SIGTERM and lets them
    agree on a step that none has passed yet.

    Attributes:
        agrees: whether there are other processes that it stops too.
        requested: the signal that came, here or to another process; None before.
        is_agreed: whether all processes know that it stops.
    """

    def __init__(self) -> None:
        import jax  # late: what prepares a process imports this file, and JAX must not be there yet

        self.requested: signal.Signals | None = None
        self.agrees = jax.distributed.is_initialized()
        self.is_agreed = not self.agrees

    def reached(self, step: int) -> bool:
        """Returns whether to stop after `step`. Call it after every step."""
        if not self.agrees:
            return self.requested is not None
        from jax.experimental import multihost_utils

        if not multihost_utils.reached_preemption_sync_point(step):
            return False
        self.requested = self.requested or signal.SIGTERM
        self.is_agreed = True
        return True

    def __enter__(self) -> Self:
        global _stop_of_run
        _stop_of_run = self
        self._before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) == signal.SIG_IGN:
                told = f"{number.name} is ignored, as it is behind a script's `&`"
                log(told)
            elif number == signal.SIGINT or not self.agrees:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        global _stop_of_run
        _stop_of_run = None
        for number, handler in self._before.items():
            signal.signal(number, handler)
        return isinstance(error, Stopped)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.requested:
            return
        self.requested = signal.Signals(number)
        if self.agrees:
            os.kill(os.getpid(), signal.SIGTERM)  # which JAX's runtime hears


def _watch(reader: int) -> None:
    """Ends the process at the first SIGINT or the second signal that `reader` gives."""
    first = 0.0  # when it came
    while number := os.read(reader, 1):
        signum = signal.Signals(number[0])
        if signum not in (signal.SIGINT, signal.SIGTERM):
            continue
        if signal.getsignal(signum) is _stop:  # to which the main thread may not come
            _stop(signum, None)
        if not first:
            first = time.monotonic()
            if _next_command:  # a run finishes its step, which may take long
                then = "finishing the step, then saving; a second one leaves at once"
                log(f"{signum.name}: {then}")
        elif time.monotonic() - first > _SAME_PRESS:
            _leave(f"left at once by a second {signum.name}", signum)


def _stop(number: int, _: FrameType | None) -> None:
    _leave("stopped by SIGINT", signal.SIGINT)


def _leave(line: str, signum: signal.Signals) -> None:
    if _next_command:
        line = f"{line}; {_next_command}"
    if os.isatty(2):  # of a bar, which hides the cursor
        line = f"\r\x1b[K\x1b[?25h{line}"
    try:
        if _leaving.acquire(timeout=1):  # two threads may hear of one press
            os.write(2, f"{line}\n".encode())
            run_on_exit(128 + signum, line)
    finally:  # nobody may read it
        os._exit(128 + signum)
