"""Ctrl-C and SIGTERM: a message instead of a traceback, and runs that stop after a step.

During imports, and during work that leaves nothing unfinished, Ctrl-C ends the process at once.
Elsewhere the first signal raises KeyboardInterrupt or stops the training loop after its step, and a
second one ends the process at once, even if the main thread cannot run a handler.
"""

import math
import os
import queue
import signal
import threading
import time
from types import FrameType
from typing import Self, TypeVar

from gpt2.errors import log, run_on_exit

T = TypeVar("T")

# Seconds within which a launcher may forward a signal that the terminal has sent to us already.
_SAME_PRESS = 0.3
# Held by the thread that prints the last line; never released.
_exit_lock = threading.Lock()
_is_watched = False  # whether a thread waits for signals
_GRACE = 5.0  # seconds for which a validation may go on after a signal
_next_command = ""  # what a person can do after an exit
_loop_stop: "StopSignal | None" = None  # of the current training loop


def begin_process() -> None:
    """Make Ctrl-C end the process with a message while modules are imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_by_interrupt)


def raise_at_interrupt() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again, and a second one end the process at once.

    A thread does the latter, because the main thread runs handlers only between Python bytecodes.
    """
    global _is_watched
    handler = signal.getsignal(signal.SIGINT)
    if _is_watched or handler not in (_exit_by_interrupt, signal.SIG_IGN):
        return
    _is_watched = True
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # A forked child must not write to this pipe.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True).start()
    if handler is _exit_by_interrupt:  # jobs of a script's `&` ignore SIGINT
        signal.signal(signal.SIGINT, signal.default_int_handler)


def exit_at_interrupt(next_command: str = "") -> None:
    """Make Ctrl-C end the process with a message, which may name the next command.

    An exception could get lost in a callback of JAX.
    """
    global _next_command
    _next_command = next_command
    if _is_watched and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _exit_by_interrupt)


class Stopped(Exception):
    """A signal has stopped the run while it waited for data. StopSignal suppresses it."""


def get_unless_stopped(ready: queue.Queue[T]) -> T:
    """Return the next item of a queue, or raises Stopped if a signal stops the run before.

    A validation that has begun may go on for a few seconds. If there are several processes, it
    keeps waiting, because the others wait for this process.
    """
    while True:
        stop = _loop_stop
        is_stopping = stop and stop.requested and not stop.has_peers
        if stop and is_stopping and time.monotonic() > stop.deadline:
            raise Stopped
        try:
            return ready.get(timeout=0.5)
        except queue.Empty:
            if is_stopping:
                raise Stopped from None


class StopSignal:
    """Make SIGTERM and SIGINT end the loop after a step, which is the same in every process.

    A signal to any process stops all of them: JAX's runtime listens for SIGTERM, and chooses a step
    that no process has passed yet.

    Attributes:
        has_peers: whether other processes train in the same run.
        requested: the signal received, here or by another process; None before.
        is_agreed: whether all processes are going to stop.
    """

    def __init__(self) -> None:
        # Imported here, because this module is loaded before the process is ready for JAX.
        import jax

        self.requested: signal.Signals | None = None
        self.deadline = math.inf  # when reading ends, by time.monotonic
        self.has_peers = jax.distributed.is_initialized()
        self.is_agreed = not self.has_peers

    def reached(self, step: int) -> bool:
        """Return whether to stop after `step`. Call it after every step."""
        if not self.has_peers:
            return self.requested is not None
        from jax.experimental import multihost_utils

        if not multihost_utils.reached_preemption_sync_point(step):
            return False
        self.requested = self.requested or signal.SIGTERM
        self.is_agreed = True
        return True

    def __enter__(self) -> Self:
        global _loop_stop
        _loop_stop = self
        self._handlers = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) == signal.SIG_IGN:
                log(f"{number.name} is ignored, as in jobs of a script's `&`")
            elif number == signal.SIGINT or not self.has_peers:
                self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        global _loop_stop
        _loop_stop = None
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        return isinstance(error, Stopped)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.requested:
            return
        self.requested = signal.Signals(number)
        self.deadline = time.monotonic() + _GRACE
        if self.has_peers:
            os.kill(os.getpid(), signal.SIGTERM)  # notifies JAX's runtime


def _watch(reader: int) -> None:
    """Read signals from a pipe, and ends the process at the second one.

    It ends at the first SIGINT if that has no handler that saves something.
    """
    first = 0.0  # time of the first signal
    while number := os.read(reader, 1):
        signum = signal.Signals(number[0])
        if signum not in (signal.SIGINT, signal.SIGTERM):
            continue
        if signal.getsignal(signum) is _exit_by_interrupt:
            # The main thread may be unable to run it.
            _exit_by_interrupt(signum, None)
        if not first:
            first = time.monotonic()
            if _next_command:  # the step of a run may take long
                log(
                    f"{signum.name}: finishing the step, then saving; a second one exits at once"
                )
        elif time.monotonic() - first > _SAME_PRESS:
            _exit(f"stopped at once by a second {signum.name}", signum)


def _exit_by_interrupt(number: int, _: FrameType | None) -> None:
    _exit("stopped by SIGINT", signal.SIGINT)


def _exit(line: str, signum: signal.Signals) -> None:
    if _next_command:
        line = f"{line}; {_next_command}"
    if os.isatty(2):  # a progress bar may have hidden the cursor
        line = f"\r\x1b[K\x1b[?25h{line}"
    try:
        if _exit_lock.acquire(timeout=1):  # two threads may receive the same signal
            os.write(2, f"{line}\n".encode())
            run_on_exit(128 + signum, line)
    finally:  # even if stderr is closed
        os._exit(128 + signum)
