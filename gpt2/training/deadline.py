"""Stops a run in time for a queue's limit, so that its state is saved before."""

from collections.abc import Callable

import jax

from gpt2 import launch
from gpt2.errors import UserError
from gpt2.parallel import distributed
from gpt2.telemetry.throughput import StepClock
from gpt2.training.checkpoint import Checkpointer

MARGIN = 1.25  # times what was measured: another save, on a store that others use too
END_SECONDS = 5.0  # in which files are closed and the process ends


class Deadline:
    """Tells when a run has to stop, from what its steps, saves and validations have taken.

    The first process decides for all. Time counts from its start, imports, data and compilation
    included. The first step after a start is saved, so that a save has been measured.

    Args:
        max_seconds: of `--max_seconds`; None: there is no limit.
        clock: of the run.
        checkpointer: of the run.
        validation_seconds: returns how long a validation takes.
    """

    def __init__(
        self,
        max_seconds: float | None,
        clock: StepClock,
        checkpointer: Checkpointer,
        validation_seconds: Callable[[], float],
    ):
        self._max_seconds, self._clock = max_seconds, clock
        self._checkpointer, self._validation_seconds = checkpointer, validation_seconds

    @property
    def exists(self) -> bool:
        """Whether there is a limit."""
        return self._max_seconds is not None

    def check(self) -> None:
        """Raises a UserError, in all processes, if no step is possible any more."""
        if self._max_seconds is None:
            return
        age = launch.seconds_since_start()
        if distributed.from_first(int(age + END_SECONDS > self._max_seconds)):
            raise UserError(
                f"--max_seconds={self._max_seconds:g} leaves no time for a step: to start and to "
                f"compile took {age:.0f} s",
                "Give more",
            )

    def seconds_to_stop(self) -> float:
        """Returns how long it may take from now until a stopped run has ended.

        Processes agree on a step up to two after the next. That step may have to be validated. A
        save may be under way, for which the last one waits.
        """
        steps = 3 * max(self._clock.newest_seconds, default=0.0)
        saves = 2 * self._checkpointer.longest_seconds
        return MARGIN * (steps + self._validation_seconds() + saves) + END_SECONDS

    def why_stop(self) -> str:
        """Returns why the run has to stop after this step, for people; empty if it has not to."""
        if self._max_seconds is None or jax.process_index():
            return ""
        left, needed = self._max_seconds - launch.seconds_since_start(), self.seconds_to_stop()
        if left > needed:
            return ""
        return (
            f"--max_seconds={self._max_seconds:g} ({left:.0f} s are left, and up to {needed:.0f} s "
            "are needed)"
        )
