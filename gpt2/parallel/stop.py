"""Stopping on a signal, after the same step in every process."""

import os
import signal
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


class StopSignal:
    """Lets SIGTERM and SIGINT end the loop after its step.

    A signal to any of several processes stops all. JAX's runtime listens for SIGTERM and lets them
    agree on a step that none has passed yet.

    Attributes:
        requested: the signal that came, here or to another process; None before.
        is_agreed: whether all processes know that it stops.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._agrees = jax.distributed.is_initialized()
        self.is_agreed = not self._agrees

    def reached(self, step: int) -> bool:
        """Returns whether to stop after `step`. Call it after every step."""
        if not self._agrees:
            return self.requested is not None
        if not multihost_utils.reached_preemption_sync_point(step):
            return False
        self.requested = self.requested or signal.SIGTERM
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
        if self.requested:
            return
        self.requested = signal.Signals(number)
        if self._agrees:
            os.kill(os.getpid(), signal.SIGTERM)  # which JAX's runtime hears
