"""Reports the metrics of training steps, one step late, to files and to the screen."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from gpt2.errors import DivergedError
from gpt2.telemetry.event_file import Histogram
from gpt2.telemetry.memory import peak_memory
from gpt2.telemetry.throughput import StepClock


class Writer(Protocol):
    """Takes the metrics of a step, such as `gpt2.telemetry.metrics.MetricsWriter`.

    A context manager, which ends with what is left written.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of a step, by name."""

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Adds histograms of a step, by name."""

    def say(self, text: str) -> None:
        """Tells a person something, in a line."""

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
        skip_bad_steps: steps in a row that may be left out for not being finite.
    """

    def __init__(
        self,
        writers: Sequence[Writer],
        clock: StepClock,
        *,
        log_every: int,
        num_steps: int,
        skip_bad_steps: int = 0,
    ):
        self._writers, self._clock = writers, clock
        self._log_every, self._num_steps = log_every, num_steps
        self._skip_bad_steps = skip_bad_steps
        self._late: _Late | None = None
        self._losses: list[float] = []  # since the last line

    def step(
        self, step: int, metrics: dict[str, jax.Array], note: str = "", statistics: Any = None
    ) -> None:
        """Takes the metrics of a step that was just dispatched, and reports those of the last one.

        Args:
            step: optimizer steps done.
            metrics: scalars on the devices.
            note: what to tell a person about the step.
            statistics: of every tensor, on the devices: `norms` and `histograms` by name.

        Raises:
            DivergedError: loss or gradients of the step before are not finite.
        """
        self.catch_up()
        self._late = _Late(step, metrics, note, statistics)

    def catch_up(self) -> None:
        """Waits for the newest step and reports its metrics.

        Raises:
            DivergedError: its loss or its gradients are not finite.
        """
        if self._late is None:
            return
        late, self._late = self._late, None
        step = late.step
        values = {name: float(value) for name, value in jax.device_get(late.metrics).items()}
        self._write_statistics(late)  # those of a step that diverges too
        self._check(step, values)
        self._clock.count_step()
        if late.note:
            self.say(late.note)
        if step % self._log_every == 0 or step == self._num_steps:
            number = len(self._losses)  # 0 if all steps since the last line are left out
            values["train/loss"] = math.fsum(self._losses) / number if number else math.nan
            self._losses = []
            tokens = {"tokens": step * self._clock.tokens_per_step}
            self.write(step, tokens | values | self._clock.read() | peak_memory())

    def _write_statistics(self, late: "_Late") -> None:
        if late.statistics is None:
            return
        found = jax.device_get(late.statistics)
        self.write(late.step, {name: float(value) for name, value in found["norms"].items()})
        for writer in self._writers:
            writer.write_histograms(late.step, found["histograms"])

    def _check(self, step: int, values: dict[str, float]) -> None:
        """Raises if a step ends the run, tells of one that is left out, and keeps its loss.

        It takes out of `values` what no line shows.
        """
        loss, grad_norm = values["train/loss"], values["train/grad_norm"]
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        bad_in_a_row = values.pop("bad_in_a_row", float(not is_finite))
        is_skipped = values.pop("skipped", 0.0) > 0
        if bad_in_a_row > self._skip_bad_steps:
            what = "the gradients are" if math.isfinite(loss) else "the loss is"
            raise DivergedError(step, what, before=True)
        if is_skipped:
            what = "stand out" if is_finite else "are not finite"
            about = f"loss {loss:.4g} and gradient norm {grad_norm:.4g}"
            self.say(f"step {step} is left out: its {about} {what}")
        else:
            self._losses.append(loss)

    def say(self, text: str) -> None:
        """Tells a person something, in a line."""
        for writer in self._writers:
            writer.say(text)

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


class _Late(NamedTuple):
    """What `Reporter.step` was given, still on the devices."""

    step: int
    metrics: dict[str, jax.Array]
    note: str
    statistics: Any
