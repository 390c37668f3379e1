"""How fast a run is: tokens per second, MFU, and where time goes."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from gpt2.config import Config
from gpt2.telemetry.flops import model_flops_per_token, total_peak_flops
from gpt2.telemetry.metrics import seconds_taken
from gpt2.utils import launch


class StepClock:
    """Measures steps, and the share of a run's time that each phase takes.

    Time is charged to the innermost open phase, or to `start and end`. Devices run behind the host:
    wait for the last step before opening a validation or checkpoint. `seconds_before` is what
    earlier starts of the run have taken. Without `peak_flops`, of all devices, there is no MFU.
    """

    def __init__(
        self,
        tokens_per_step: int,
        flops_per_token: float,
        peak_flops: float | None = None,
        seconds_before: float = 0.0,
        start_seconds: float = 0.0,
        now: Callable[[], float] = time.perf_counter,
    ):
        self.tokens_per_step, self._flops, self._peak = tokens_per_step, flops_per_token, peak_flops
        self._now, self._seconds_before = now, seconds_before
        self.current, self._since = "start and end", now()
        self._seconds = defaultdict(float, {self.current: start_seconds})
        self._num_steps, self._read = 0, (0, 0.0, 0.0)  # and at `read`, with their seconds

    @classmethod
    def for_run(cls, config: Config, workdir: Path, start: int) -> "StepClock":
        """Returns the clock of a run that goes on from step `start`, on all devices."""
        return cls(
            config.tokens_per_step,
            model_flops_per_token(config.gpt()),
            total_peak_flops(config.precision.compute),
            seconds_before=seconds_taken(workdir / "metrics.jsonl", start),
            start_seconds=launch.seconds_since_start(),
        )

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charges the time within to `name`, which a profiler's trace shows too."""
        outer = self.current
        self._switch(name)
        try:
            with jax.profiler.TraceAnnotation(name):
                yield
        finally:
            self._switch(outer)

    def count_step(self) -> None:
        """Counts one optimizer step."""
        self._num_steps += 1

    def read(self) -> dict[str, float]:
        """Returns the mean speed of steps since the last call, all devices together, if any."""
        self._switch(self.current)
        wait = self._seconds["data wait"]
        now = self._num_steps, self._seconds["step"] + wait, wait
        steps, seconds, wait = (new - old for new, old in zip(now, self._read, strict=True))
        self._read = now
        if not (steps and seconds):
            return {}
        tokens_per_second = self.tokens_per_step * steps / seconds
        metrics = {
            "perf/step_seconds": seconds / steps,
            "perf/tokens_per_second": tokens_per_second,
            "perf/data_wait_seconds": wait / steps,
            "perf/total_seconds": self.total_seconds,
        }
        if self._peak:
            metrics["perf/mfu"] = tokens_per_second * self._flops / self._peak
        return metrics

    @property
    def total_seconds(self) -> float:
        """What the run has taken, `seconds_before` included."""
        self._switch(self.current)
        return self._seconds_before + sum(self._seconds.values())

    def shares(self) -> dict[str, float]:
        """Returns each phase's share of the wall time of this start; they add to 1."""
        self._switch(self.current)
        total = sum(self._seconds.values())
        ranked = sorted(self._seconds.items(), key=lambda item: -item[1])
        return {name: seconds / total for name, seconds in ranked if seconds}

    def _switch(self, name: str) -> None:
        now = self._now()
        self._seconds[self.current] += now - self._since
        self.current, self._since = name, now
