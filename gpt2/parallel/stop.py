"""Stopping on a signal or in time for a limit, after the same step in every process."""

import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from gpt2.parallel import distributed
from gpt2.utils import launch

MARGIN_SECONDS = 10.0  # in which files are closed and the process ends
MARGIN = 1.25  # times what was measured: another save, on a store that others use too


class Deadline:
    """Tells when a run has to stop, from the longest step, validation and save so far.

    Time counts from the start of the process. The first process decides for all.
    """

    def __init__(self, max_seconds: float | None, save_seconds: Callable[[], float]):
        self._max_seconds, self._save_seconds = max_seconds, save_seconds
        self._asked, self._longest = time.monotonic(), 0.0

    def is_over(self, step: int) -> bool:
        """Returns whether the run has to stop after `step`. Call it once for every step."""
        now = time.monotonic()
        # From one step to the next lies a validation too, where one is due.
        self._longest, self._asked = max(self._longest, now - self._asked), now
        if self._max_seconds is None or jax.process_index():
            return False
        needed = MARGIN * (2 * self._longest + self._save_seconds()) + MARGIN_SECONDS
        return launch.seconds_since_start() + needed > self._max_seconds


class StopSignal:
    """Lets SIGTERM, SIGINT and the end of the run's time end the loop after its step.

    A signal to any of several processes stops all, and so does the first one's clock. JAX's runtime
    listens for SIGTERM and lets them agree on a step that none has passed yet.

    Attributes:
        requested: the signal that came, or SIGTERM in place of one; None before.
        is_late: whether it stops since the first process's time is over.
        is_agreed: whether all processes know that it stops.
    """

    def __init__(self, is_over: Callable[[int], bool] = lambda step: False):
        self.requested: signal.Signals | None = None
        self.is_late = False
        self._is_over = is_over
        self._agrees = jax.distributed.is_initialized()
        self.is_agreed = not self._agrees

    def reached(self, step: int) -> bool:
        """Returns whether to stop after `step`. Call it after every step."""
        if not self.requested and self._is_over(step):
            self.is_late = True
            self._request(signal.SIGTERM)
        if not self._agrees:
            return self.requested is not None
        if not multihost_utils.reached_preemption_sync_point(step):
            return False
        self.requested = self.requested or signal.SIGTERM
        self.is_agreed = True
        self.is_late = bool(distributed.from_first(int(self.is_late)))
        return True

    def __enter__(self) -> "StopSignal":
        signals = (signal.SIGINT,) if self._agrees else (signal.SIGTERM, signal.SIGINT)
        self._before: dict[int, Any] = {
            number: signal.signal(number, self._on_signal) for number in signals
        }
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if not self.requested:
            self._request(signal.Signals(number))

    def _request(self, number: signal.Signals) -> None:
        self.requested = number
        if self._agrees:
            os.kill(os.getpid(), signal.SIGTERM)  # which JAX's runtime hears
