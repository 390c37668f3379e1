"""Stopping on a signal or in time for a limit, after the same step in every process."""

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


class StopSignal:
    """Lets SIGTERM, SIGINT and the end of the run's time end the loop after its step.

    Further ones of SIGTERM change nothing, so that a save that goes on is finished. A second SIGINT
    ends the process at once: see `gpt2.launch.take_interrupts`.

    If there are several processes, a signal to any of them stops all, and so does the first one's
    clock. JAX's runtime listens for SIGTERM and lets them agree on a step that none has passed yet.

    Args:
        why_now: returns why the run's time is over, for people, or an empty text; asked after
            every step.

    Attributes:
        requested: the signal that came, or SIGTERM in place of one; None before.
        reason: why the run stops, for people.
        is_agreed: whether all processes know that it stops.
    """

    def __init__(self, why_now: Callable[[], str] = str):
        self.requested: signal.Signals | None = None
        self.reason = ""
        self._why_now = why_now
        self._agrees = jax.distributed.is_initialized()
        self.is_agreed = not self._agrees

    def reached(self, step: int) -> bool:
        """Returns whether to stop after `step`. Call it after every step."""
        if not self.requested and (reason := self._why_now()):
            self._request(signal.SIGTERM, reason)
        if not self._agrees:
            return self.requested is not None
        if not multihost_utils.reached_preemption_sync_point(step):
            return False
        if not self.requested:
            self.requested, self.reason = signal.SIGTERM, signal.SIGTERM.name
        self.is_agreed = True
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
            self._request(signal.Signals(number), signal.Signals(number).name)

    def _request(self, number: signal.Signals, reason: str) -> None:
        self.requested, self.reason = number, reason
        if self._agrees:
            os.kill(os.getpid(), signal.SIGTERM)  # which JAX's runtime hears
