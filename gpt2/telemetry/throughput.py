"""How fast a run is: tokens per second, MFU, and where time goes."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial

import jax

from gpt2.config import Config
from gpt2.config.shapes import Shape
from gpt2.telemetry.chips import total_peak_flops
from gpt2.utils import launch
from gpt2.utils.text import format_duration


class StepClock:
    """Measures steps, and the share of this process's time that each phase takes.

    Time is charged to the innermost open phase, or to `start and end`. Devices run behind the host:
    wait for the last step before opening a validation or checkpoint. `tokens` and `flops` are of so
    many steps. Without `peak_flops`, of all devices: no MFU. `since` is when the process began.
    """

    def __init__(
        self,
        tokens: Callable[[int], float],
        flops: Callable[[int], float],
        peak_flops: float | None = None,
        since: float = launch.BEGAN,
        now: Callable[[], float] = time.perf_counter,
    ):
        self.tokens = tokens
        self.flops = flops
        self._peak = peak_flops
        self._now = now
        self.current = "start and end"
        self._since = since
        self._seconds = defaultdict[str, float](float)
        self._last = 0  # step
        # Since the last `read`.
        self._num_steps = 0
        self._lap = defaultdict[str, float](float)

    @classmethod
    def for_run(
        cls,
        config: Config,
        flops_per_token: Callable[[Shape], float],
        share: int = 1,
        since: float = launch.BEGAN,
    ) -> "StepClock":
        """Returns the clock of a run on all devices; `share` runs at once share the time."""

        @cache
        def cost(shape: Shape) -> float:
            return shape.tokens * flops_per_token(shape)

        return cls(
            tokens=config.shapes.tokens,
            flops=partial(config.shapes.sum, cost),
            peak_flops=total_peak_flops(config.precision.compute),
            since=since / share,
            now=lambda: time.perf_counter() / share,
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
            "perf/total_seconds": total,
            "perf/goodput": self._seconds["step"] / total,
        }
        if self._peak:
            flops = self.flops(last) - self.flops(first)
            metrics["perf/mfu"] = flops / seconds / self._peak
        return metrics

    @property
    def total_seconds(self) -> float:
        """The time since the process began."""
        self._switch(self.current)
        return sum(self._seconds.values())

    def describe(self) -> str:
        """Returns where the time went, as text for people: that of steps is called `goodput`."""
        total = self.total_seconds
        longest_first = sorted(self._seconds.items(), key=lambda item: -item[1])
        spent = list[str]()
        for name, seconds in longest_first:
            share = seconds / total
            label = "goodput" if name == "step" else name
            if share >= 0.005:
                spent.append(f"{label} {share:.0%}")
        return f"{format_duration(total)}; {', '.join(spent)}"

    def _switch(self, name: str) -> None:
        now = self._now()
        passed = now - self._since
        self._seconds[self.current] += passed
        self._lap[self.current] += passed
        self.current = name
        self._since = now
