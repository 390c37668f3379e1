"""Ctrl-C and SIGTERM: a message instead of a traceback, and runs that stop after a step.

During imports, and during work that can be interrupted safely, Ctrl-C ends the process immediately.
At other times the first signal raises KeyboardInterrupt or stops the training loop after its step.
A second signal ends the process immediately, even if the main thread cannot run a handler.
"""

import math
import os
import queue
import signal
import threading
import time
from types import FrameType
from typing import Self, TypeVar

from gpt2.errors import log

T = TypeVar("T")

# Seconds within which a second signal is taken for a copy of the first, because a launcher may
# forward a signal that the terminal has also sent to this process.
_SAME_PRESS = 0.3
# The thread that prints the exit message acquires this lock and never releases it, so that no other
# thread prints a second message. A second signal in the same thread ends the process immediately.
_exit_lock = threading.RLock()
_is_watched = False  # whether the thread of `_watch` is running
_GRACE = 5.0  # seconds for which a validation may continue after a signal
# The end of the exit message: how to continue the run. Empty outside of a run.
_next_command = ""
_loop_stop: "StopSignal | None" = None  # the StopSignal of the current training loop


def begin_process() -> None:
    """Make Ctrl-C end the process with a message while modules are imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_by_interrupt)


def raise_at_interrupt() -> None:
    """Make Ctrl-C raise KeyboardInterrupt, and a second Ctrl-C end the process immediately.

    This undoes `begin_process`, and is called once all modules are imported. At the second Ctrl-C,
    a thread ends the process, because the main thread runs signal handlers only between Python
    bytecodes, and a long call of C code would delay them.
    """
    global _is_watched
    handler = signal.getsignal(signal.SIGINT)
    if _is_watched or handler not in (_exit_by_interrupt, signal.SIG_IGN):
        return
    _is_watched = True
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # A forked child inherits the pipe. Without this line, a signal to the child would reach
    # `_watch`, which would take it for a signal to this process.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True).start()
    if handler is _exit_by_interrupt:  # background jobs of a script ignore SIGINT
        signal.signal(signal.SIGINT, signal.default_int_handler)


def exit_at_interrupt(next_command: str = "") -> None:
    """Make Ctrl-C end the process with a message.

    The message ends with the text `next_command`, for example "to continue, repeat the command".
    KeyboardInterrupt is not enough here, because a callback of JAX could swallow the exception.
    """
    global _next_command
    _next_command = next_command
    if _is_watched and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _exit_by_interrupt)


class Stopped(Exception):
    """Raised if a signal stops the run while the run waits for data.

    The context manager `StopSignal` suppresses this exception, so the run ends normally.
    """


def get_unless_stopped(ready: queue.Queue[T]) -> T:
    """Return the next item of the queue `ready`. Raise Stopped if a signal stops the run first.

    For a few seconds after the signal, items that are ready are still returned, so that a
    validation that has begun can continue. In a run of several processes the signal is ignored
    here, because the other processes wait for this one.
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
    """A context in which SIGTERM and SIGINT end the training loop after a step.

    All processes stop after the same step. A signal to any process stops all of them: JAX's runtime
    listens for SIGTERM, and chooses a step that no process has passed yet.

    Attributes:
        has_peers: whether other processes train in the same run.
        requested: the signal that this or another process received; None if there was none.
        is_agreed: whether all processes have agreed to stop.
    """

    def __init__(self) -> None:
        # JAX is imported here, because this module is loaded before the process is ready for JAX.
        import jax

        self.requested: signal.Signals | None = None
        # The time at which waiting for data ends, by time.monotonic.
        self.deadline = math.inf
        self.has_peers = jax.distributed.is_initialized()
        self.is_agreed = not self.has_peers

    def reached(self, step: int) -> bool:
        """Return whether the loop stops after `step`. The loop calls this after every step."""
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
                log(
                    f"{number.name} is ignored, because the shell started this process with "
                    f"{number.name} ignored, as it does with background jobs of a script"
                )
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
            os.kill(os.getpid(), signal.SIGTERM)  # JAX's runtime notifies all processes


def _watch(reader: int) -> None:
    """Read SIGINT and SIGTERM from a pipe, and end the process at the second of these signals.

    `reader` is the file descriptor of the pipe, to which Python writes the number of each signal.
    While `_exit_by_interrupt` is the handler of SIGINT, the first SIGINT ends the process.
    """
    first = 0.0  # time of the first signal
    while number := os.read(reader, 1):
        signum = signal.Signals(number[0])
        if signum not in (signal.SIGINT, signal.SIGTERM):
            continue
        if signal.getsignal(signum) is _exit_by_interrupt:
            # The main thread may be unable to run its handler.
            _exit_by_interrupt(signum, None)
        if not first:
            first = time.monotonic()
            if _next_command:  # a run, which first finishes its step
                log(
                    f"{signum.name}: finishing the step, then saving; a second signal exits "
                    "immediately"
                )
        elif time.monotonic() - first > _SAME_PRESS:
            _exit(f"stopped immediately by a second {signum.name}", signum)


def _exit_by_interrupt(number: int, _: FrameType | None) -> None:
    _exit("stopped by SIGINT", signal.SIGINT)


def _exit(line: str, signum: signal.Signals) -> None:
    if _next_command:
        line = f"{line}; {_next_command}"
    if os.isatty(2):  # a progress bar may have hidden the cursor
        line = f"\r\x1b[K\x1b[?25h{line}"
    try:
        # Two threads may receive the same signal.
        if _exit_lock.acquire(timeout=1):
            os.write(2, f"{line}\n".encode())
    finally:  # even if stderr is closed
        os._exit(128 + signum)
