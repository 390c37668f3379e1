"""Reports the metrics of training steps, one step late, to files and to the screen."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from gpt2.errors import DivergedError
from gpt2.telemetry.throughput import StepClock


class Writer(Protocol):
    """Takes the metrics of a step, such as `gpt2.telemetry.metrics.MetricsWriter`.

    A context manager, which ends with what is left written.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of a step, by name."""

    def flush(self, step: int) -> None:
        """Puts all metrics up to `step` on disk."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: Any) -> Any: ...


class Reporter:
    """Fetches the metrics of each step while the next one runs, so that no device waits for them.

    It is a context manager, which enters and leaves its writers.

    Args:
        writers: where metrics go; none in a process that reports nothing.
        clock: of the run.
        log_every: steps from one line to the next.
        num_steps: of the run; the last one gets a line too.
    """

    def __init__(
        self,
        writers: Sequence[Writer],
        clock: StepClock,
        *,
        log_every: int,
        num_steps: int,
    ):
        self._writers, self._clock = writers, clock
        self._log_every, self._num_steps = log_every, num_steps
        self._late: tuple[int, dict[str, jax.Array]] | None = None  # still on the devices

    def step(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Takes the metrics of a step that was just dispatched, and reports those of the last one.

        Raises:
            DivergedError: the loss of the step before is not finite.
        """
        self.catch_up()
        self._late = step, metrics

    def catch_up(self) -> None:
        """Waits for the newest step and reports its metrics.

        Raises:
            DivergedError: its loss is not finite.
        """
        if self._late is None:
            return
        (step, metrics), self._late = self._late, None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if not math.isfinite(values["train/loss"]):
            raise DivergedError(step)
        self._clock.count_step()
        if step % self._log_every == 0 or step == self._num_steps:
            tokens = {"tokens": step * self._clock.tokens_per_step}
            self.write(step, tokens | values | self._clock.read())

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Hands metrics to every writer."""
        for writer in self._writers:
            writer.write(step, values)

    def flush(self, step: int) -> None:
        """Puts all metrics up to `step` on disk. Call it before a checkpoint of `step`."""
        for writer in self._writers:
            writer.flush(step)

    def __enter__(self) -> "Reporter":
        with contextlib.ExitStack() as stack:
            for writer in self._writers:
                stack.enter_context(writer)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._open.__exit__(*exception)
