"""Stops a run in time for a queue's limit, so that its state is saved before."""

import math
from collections.abc import Callable

import jax

from gpt2 import launch
from gpt2.config import TrainConfig
from gpt2.errors import UserError
from gpt2.parallel import distributed
from gpt2.telemetry.throughput import StepClock
from gpt2.training.checkpoint import Checkpointer

MARGIN = 1.25  # times what was measured: another save, on a store that others use too
END_SECONDS = 5.0  # in which files are closed and the process ends
NOTICE_SECONDS = 1.0  # after which JAX's runtime looks again whether a process has to stop


class Deadline:
    """Tells when a run has to stop, from what its steps, saves and validations have taken.

    The first process decides for all. Time counts from its start, imports, data and compilation
    included. The first step of each start is saved, and a part of a validation is done, so that
    both have been measured.

    Args:
        max_seconds: of `--max_seconds`; None: there is no limit.
        train: the `train.` options, which tell when validations and saves are due.
        clock: of the run.
        checkpointer: of the run.
        validation_seconds: returns how long a validation takes.

    Attributes:
        reason: why a run that is over has stopped, for people.
    """

    def __init__(
        self,
        max_seconds: float | None,
        train: TrainConfig,
        clock: StepClock,
        checkpointer: Checkpointer,
        validation_seconds: Callable[[], float],
    ):
        self._max_seconds, self._train, self._clock = max_seconds, train, clock
        self._checkpointer, self._validation_seconds = checkpointer, validation_seconds
        self.reason = f"--max_seconds={max_seconds or 0:g}"

    @property
    def exists(self) -> bool:
        """Whether there is a limit."""
        return self._max_seconds is not None

    def check(self, step: int) -> None:
        """Raises a UserError, in all processes, if the limit is too short for a start.

        A start that ends after a step or two gets nowhere, and neither does one that has no time
        for a validation, which every run needs at its end.

        Args:
            step: the step before the first, or the first one, once it is saved and measured.
        """
        if self._max_seconds is None:
            return
        age = launch.seconds_since_start()
        needed = self.seconds_to_stop(step + 1, least_validations=1)
        if distributed.from_first(int(age + needed > self._max_seconds)):
            enough = 10 * math.ceil(2 * (age + needed) / 10)
            raise UserError(
                f"--max_seconds={self._max_seconds:g} leaves no time to train: to start took "
                f"{age:.0f} s, and to stop may take {needed:.0f} s",
                f"With --max_seconds={enough}, half of the time is for steps",
            )

    def seconds_to_stop(self, step: int, least_validations: int = 0) -> float:
        """Returns how long it may take until the run has ended, if it does not stop after `step`.

        A single process then stops after the next step at the soonest, and has two steps to
        finish. Several processes agree on a step up to two after that, and need a while to notice
        that they have to. What is due after each of these steps counts. A save first waits for the
        one before it, and for a batch to be scored, which takes less than a step.
        """
        agree = jax.process_count() > 1
        iterations, unnoticed = (4, NOTICE_SECONDS) if agree else (2, 0.0)
        meanwhile = math.ceil(unnoticed / min(self._clock.newest_seconds, default=1.0))
        end = min(step + iterations + meanwhile, self._train.num_steps + 1)
        validates = [self._recurs(number, self._train.eval_every) for number in range(step, end)]
        checkpoints = [
            self._recurs(number, self._train.checkpoint_every) for number in range(step, end)
        ]
        validations = min(iterations, sum(validates))
        # Any validation may be the best so far. The state is saved at the end in any case.
        either = [v or c for v, c in zip(validates, checkpoints, strict=True)]
        saves = 1 + min(iterations - 1, sum(either[:-1]))
        return END_SECONDS + MARGIN * (
            (iterations + saves) * self._slowest_step
            + max(validations, least_validations) * self._validation_seconds()
            + (saves + self._checkpointer.is_saving()) * self._checkpointer.longest_seconds
        )

    def is_over(self, step: int) -> bool:
        """Returns whether the run has to stop after `step`; False in all processes but the first.

        Before the first step is done, `check` decides.
        """
        if self._max_seconds is None or jax.process_index() or not self._clock.newest_seconds:
            return False
        left = self._max_seconds - launch.seconds_since_start()
        needed = self.seconds_to_stop(step)
        if left > needed:
            return False
        self.reason += f" ({left:.0f} s are left, and up to {needed:.0f} s are needed)"
        return True

    def _recurs(self, step: int, every: int) -> bool:
        return step == self._train.num_steps or (every > 0 and step % every == 0)

    @property
    def _slowest_step(self) -> float:
        return max(self._clock.newest_seconds, default=0.0)
