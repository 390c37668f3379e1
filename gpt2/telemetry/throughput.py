"""How fast a run is: tokens per second, MFU, and where time goes."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import jax

from gpt2.config import Config
from gpt2.config.shapes import Shape
from gpt2.telemetry.flops import total_peak_flops
from gpt2.telemetry.metrics import SECONDS


class StepClock:
    """Measures steps, and the share of a run's time that each phase takes, over all its starts.

    Time is charged to the innermost open phase, or to `start and end`. Devices run behind the host:
    wait for the last step before opening a validation or checkpoint. `before` has the seconds since
    the run's first start, by phase, and those that were `lost` and `down`: see docs/safety.md.
    `tokens` and `flops` are of so many steps. Without `peak_flops`, of all devices: no MFU.
    """

    def __init__(
        self,
        tokens: Callable[[int], float],
        flops: Callable[[int], float],
        peak_flops: float | None = None,
        before: Mapping[str, float] | None = None,
        now: Callable[[], float] = time.perf_counter,
    ):
        self.tokens = tokens
        self.flops = flops
        self._peak = peak_flops
        self._now = now
        self.current = "start and end"
        self._since = now()
        self._seconds = defaultdict(float, before or {})
        self._last = 0  # step
        # Since the last `read`.
        self._num_steps = 0
        self._lap = defaultdict[str, float](float)

    @classmethod
    def for_run(
        cls,
        config: Config,
        flops_per_token: Callable[[Shape], float],
        before: Mapping[str, float] | None,
    ) -> "StepClock":
        """Returns the clock of a run on all devices."""
        costs = dict[Shape, float]()
        for shape in config.shapes.pieces.values():
            costs[shape] = shape.tokens * flops_per_token(shape)
        return cls(
            tokens=config.shapes.tokens,
            flops=partial(config.shapes.sum, costs.__getitem__),
            peak_flops=total_peak_flops(config.precision.compute),
            before=before,
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

    def count_step(self, step: int) -> None:
        """Counts an optimizer step, the one after the step before."""
        self._num_steps += 1
        self._last = step

    def read(self) -> dict[str, float]:
        """Returns the mean speed of steps since the last call, all devices together, if any."""
        total = self.total_seconds
        steps = self._num_steps
        wait = self._lap["data wait"]
        seconds = self._lap["step"] + wait
        self._num_steps = 0
        self._lap.clear()
        if not (steps and seconds):
            return {}
        last = self._last
        first = last - steps
        tokens = self.tokens(last) - self.tokens(first)
        metrics = {
            "perf/step_seconds": seconds / steps,
            "perf/tokens_per_second": tokens / seconds,
            "perf/data_wait_seconds": wait / steps,
            "perf/total_seconds": sum(self.books().values()),
            "perf/goodput": self._seconds["step"] / total,
        }
        if self._peak:
            flops = self.flops(last) - self.flops(first)
            metrics["perf/mfu"] = flops / seconds / self._peak
        return metrics

    def books(self) -> dict[str, float]:
        """Returns the seconds of each phase, for the line of a save, from which a run goes on."""
        self._switch(self.current)
        books = dict[str, float]()
        for name, seconds in self._seconds.items():
            if name not in ("lost", "down"):
                books[f"{SECONDS}{name}"] = seconds
        return books

    @property
    def total_seconds(self) -> float:
        """The time since the run's first start."""
        self._switch(self.current)
        return sum(self._seconds.values())

    def shares(self) -> dict[str, float]:
        """Returns the share of each phase in `total_seconds`, that of steps as `goodput`."""
        total = self.total_seconds
        shares = dict[str, float]()
        longest_first = sorted(
            self._seconds, key=self._seconds.__getitem__, reverse=True
        )
        for name in longest_first:
            label = "goodput" if name == "step" else name
            if self._seconds[name]:
                shares[label] = self._seconds[name] / total
        return shares

    def _switch(self, name: str) -> None:
        now = self._now()
        self._seconds[self.current] += now - self._since
        self._lap[self.current] += now - self._since
        self.current = name
        self._since = now
