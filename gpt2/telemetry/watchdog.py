"""Ends a run that hangs, and shows where each of its threads stands."""

import faulthandler
import os
import statistics
import sys
import threading
from collections.abc import Callable

from gpt2.errors import tell, unheard
from gpt2.telemetry.throughput import StepClock
from gpt2.utils.text import format_duration

EXIT_CODE = 4
TIMES_A_STEP = 10
# The first step may wait for other processes to compile, and for devices to find each other.
FIRST_STEP_SECONDS = 1800.0
_WATCHED = ("step", "data wait")  # phases in which steps should end


class Watchdog:
    """A thread that ends the process if steps stop coming; a context manager.

    Between steps, at most `least_seconds` may pass, and ten times the median of what the newest
    steps took. Compilation, validation and checkpoints do not count. Neither does time in which
    the process was stopped (SIGSTOP): the thread counts how often it looks, and looks at no clock.

    Args:
        clock: of the run.
        least_seconds: see above; 0: no thread.
        end: called with the exit code; does not return, except in tests.
    """

    def __init__(
        self, clock: StepClock, least_seconds: float, end: Callable[[int], object] = os._exit
    ):
        self._clock, self._least, self._end = clock, least_seconds, end
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def limit(self) -> float:
        """Returns how many seconds may pass now without a step."""
        if not self._clock.newest_seconds:
            return max(self._least, FIRST_STEP_SECONDS)
        median = statistics.median(list(self._clock.newest_seconds))
        return max(self._least, TIMES_A_STEP * median)

    def __enter__(self) -> "Watchdog":
        if self._least:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        if self._least:
            self._thread.join()

    def _watch(self) -> None:
        pause = min(5.0, self._least / 10)
        quiet, steps = 0.0, -1
        while not self._closed.wait(pause):
            goes_on = self._clock.num_steps != steps or self._clock.current not in _WATCHED
            quiet, steps = 0.0 if goes_on else quiet + pause, self._clock.num_steps
            if quiet > self.limit():
                self._tell(quiet)
                self._end(EXIT_CODE)
                return

    def _tell(self, quiet: float) -> None:
        newest = self._clock.newest_seconds
        usual = f"a step took {statistics.median(list(newest)):.2g} s" if newest else "none ended"
        with unheard(sys.stdout):
            sys.stdout.flush()
        faulthandler.dump_traceback(sys.stderr)
        tell(
            f"error: the run hangs: no step has ended for {format_duration(quiet)}, and {usual}. "
            "The stacks of all threads are above; the same command continues from the last "
            "checkpoint."
        )
