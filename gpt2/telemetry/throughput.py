"""Measure the speed of a run: tokens per second, MFU, and the time spent in each phase."""

import contextlib
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial

import jax

from gpt2.config import Config
from gpt2.config.shapes import StepShape
from gpt2.telemetry.chips import total_peak_flops
from gpt2.utils import launch
from gpt2.utils.text import format_duration


class StepClock:
    """A clock that measures the speed of steps and the time in each phase of this process.

    Time is counted for the innermost open phase, or for `setup and finish` if no phase is open.
    Devices run behind the host, so wait for the last step before opening the phase of a validation
    or checkpoint.

    Args:
        tokens: a function of n that returns the number of tokens in the first n steps.
        flops: a function of n that returns the FLOPs of the first n steps.
        peak_flops: peak FLOP/s of all devices together; None: MFU is not computed.
        since: the time at which the process began, in seconds on the clock of `now`.
        now: a function that returns the current time in seconds.

    Attributes:
        current: the name of the innermost open phase.
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
        self.current = "setup and finish"
        self._since = since
        self._seconds = defaultdict[str, float](float)
        # The step after which this process continues the run.
        self._begin: int | None = None
        self._last = 0  # the newest step
        # Steps and seconds since the last `read`.
        self._num_steps = 0
        self._lap = defaultdict[str, float](float)

    @classmethod
    def for_run(
        cls,
        config: Config,
        flops_per_token: Callable[[StepShape], float],
    ) -> "StepClock":
        """Return the clock of a run with the options `config`.

        `flops_per_token(shape)` returns the FLOPs per token of a step of this shape. Tokens, FLOPs
        and peak FLOP/s are sums over the devices of all processes.
        """

        @cache
        def cost(shape: StepShape) -> float:
            return shape.tokens * flops_per_token(shape)

        return cls(
            tokens=config.shapes.tokens,
            flops=partial(config.shapes.sum, cost),
            peak_flops=total_peak_flops(config.precision.compute),
        )

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the body of `with` for the phase `name`.

        The name also appears in a trace of JAX's profiler.
        """
        outer = self.current
        self._switch(name)
        try:
            with jax.profiler.TraceAnnotation(name):
                yield
        finally:
            self._switch(outer)

    def count_step(self, step: int) -> None:
        """Record that the optimizer step `step` is complete."""
        if self._begin is None:
            self._begin = step - 1
        self._num_steps += 1
        self._last = step

    def read(self) -> dict[str, float]:
        """Return the metrics `perf/...` by name, as means over the steps since the last call.

        Exceptions are `perf/total_seconds` and `perf/goodput`, which are for the time since the
        process began. Tokens per second are the sum over all devices. If no step was completed
        since the last call, the dict is empty.
        """
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
        """Seconds since the process began."""
        self._switch(self.current)
        return sum(self._seconds.values())

    def describe(self) -> str:
        """Return log lines with this process's total time and the percentage of each phase.

        The phase of the training steps is called `steps`. Phases of less than 0.5 % are left out.
        """
        total = self.total_seconds
        longest_first = sorted(self._seconds.items(), key=lambda item: -item[1])
        parts = list[str]()
        for name, seconds in longest_first:
            fraction = seconds / total
            label = "steps" if name == "step" else name
            if fraction >= 0.005:
                parts.append(f"{label} {fraction:.0%}")
        title = f"time since step {self._begin}" if self._begin else "time"
        line = f"{title}: {format_duration(total)}; {', '.join(parts)}"
        return textwrap.fill(line, 80, subsequent_indent="      ")

    def _switch(self, name: str) -> None:
        now = self._now()
        passed = now - self._since
        self._seconds[self.current] += passed
        self._lap[self.current] += passed
        self.current = name
        self._since = now
