"""Reports the metrics of training steps, one step late, to files and to the screen."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from gpt2.config import Config
from gpt2.errors import DivergedError
from gpt2.telemetry.chips import peak_memory
from gpt2.telemetry.event_file import Writer
from gpt2.telemetry.metrics import MetricsWriter
from gpt2.telemetry.progress import Progress
from gpt2.telemetry.throughput import StepClock
from gpt2.telemetry.watchdog import Watchdog


class Reporter:
    """Fetches the metrics of each step while the next one runs, so that no device waits for them.

    It is a context manager, which enters and leaves its writers: none in a process that reports
    nothing. Whatever scalar a step's metrics hold is logged under its name, every `log_every` steps
    and at the last one. `skip_bad_steps` in a row may have NaN or Inf.
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
        self._late: tuple[int, dict[str, jax.Array], str, Any] | None = None
        self._losses: list[float] = []  # since the last line

    @classmethod
    def for_run(cls, config: Config, clock: StepClock, workdir: Path, start: int) -> "Reporter":
        """Returns what reports a run to its files and the screen, in the first process alone."""
        train, logging = config.train, config.logging
        writers: list[Any] = [Watchdog(clock, train.hang_seconds)]
        if jax.process_index() == 0:
            files = dict(tensorboard=logging.tensorboard, wandb=logging.wandb, resume_step=start)
            writers.append(MetricsWriter(workdir, config.to_dict(), **files))
            writers.append(Progress(train.num_steps, start))
        return cls(
            writers,
            clock,
            log_every=train.log_every,
            num_steps=train.num_steps,
            skip_bad_steps=train.skip_bad_steps,
        )

    def step(
        self, step: int, metrics: dict[str, jax.Array], note: str = "", statistics: Any = None
    ) -> None:
        """Takes what a step just dispatched will give, and reports the step before: `catch_up`.

        `note` is for a person; `statistics` of tensors are `norms` and `histograms` by name.
        """
        self.catch_up()
        self._late = step, metrics, note, statistics

    def catch_up(self) -> None:
        """Waits for the newest step and reports it; a DivergedError if it holds NaN or Inf."""
        if self._late is None:
            return
        (step, metrics, note, statistics), self._late = self._late, None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if statistics is not None:  # of a step that diverges too
            found = jax.device_get(statistics)
            self.write(step, {name: float(value) for name, value in found["norms"].items()})
            for writer in self._writers:
                writer.write_histograms(step, found["histograms"])
        self._check(step, values)
        self._clock.count_step()
        if note:
            self.say(note)
        for writer in self._writers:
            writer.step(step)
        if step % self._log_every == 0 or step == self._num_steps:
            number = len(self._losses)  # 0 if all steps since the last line are skipped
            values["train/loss"] = math.fsum(self._losses) / number if number else math.nan
            self._losses = []
            tokens = {"tokens": step * self._clock.tokens_per_step}
            self.write(step, tokens | values | self._clock.read() | peak_memory())

    def _check(self, step: int, values: dict[str, float]) -> None:
        """Raises if a step ends the run, tells of one that is skipped, and keeps its loss.

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
            why = "stand out" if is_finite else "are NaN or Inf"
            about = f"loss {loss:.4g} and gradient norm {grad_norm:.4g}"
            self.say(f"step {step} is skipped: its {about} {why}")
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
            stack.enter_context(self._clock.phase("step"))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._open.__exit__(*exception)
