"""Ends a run that hangs, and shows where each of its threads stands."""

import faulthandler
import os
import statistics
import sys
import threading
from collections.abc import Callable

from gpt2.errors import tell
from gpt2.telemetry.event_file import Writer
from gpt2.telemetry.throughput import StepClock

EXIT_CODE = 4
_TIMES_A_STEP = 10
# The first step may wait for other processes to compile, and for devices to find each other.
_FIRST_STEP_SECONDS = 1800.0
_WATCHED = ("step", "data wait")  # phases in which steps should end


class Watchdog(Writer):
    """A thread that ends the process if steps stop coming; a context manager.

    Between steps, at most `least_seconds` (0: no thread) may pass, and ten times the median of the
    newest steps. Time in which the process was stopped does not count: the thread counts its looks.
    """

    def __init__(
        self, clock: StepClock, least_seconds: float, end: Callable[[int], object] = os._exit
    ):
        self._clock, self._least, self._end = clock, least_seconds, end
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._least:
            self._thread.start()
        return self

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()

    def _watch(self) -> None:
        pause = min(5.0, self._least / 10)
        quiet, steps = 0.0, -1
        while not self._closed.wait(pause):
            goes_on = self._clock.num_steps != steps or self._clock.current not in _WATCHED
            quiet, steps = 0.0 if goes_on else quiet + pause, self._clock.num_steps
            newest = list(self._clock.newest_seconds)
            allowed = _TIMES_A_STEP * statistics.median(newest) if newest else _FIRST_STEP_SECONDS
            if quiet > max(self._least, allowed):
                faulthandler.dump_traceback(sys.stderr)
                tell(
                    f"error: the run hangs: no step has ended for {quiet:.0f} s. The stacks of all "
                    "threads are above; the same command continues from the last checkpoint."
                )
                self._end(EXIT_CODE)
                return
