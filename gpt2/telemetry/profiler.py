"""A trace of a few steps, for TensorBoard's profiler or Perfetto."""

from pathlib import Path
from typing import Any

import jax


class Profiler:
    """Traces the steps `start` to `start + steps - 1`; a context manager.

    Args:
        logdir: where the trace goes; TensorBoard finds it there.
        start: the first step in the trace.
        steps: how many; 0: no trace.
    """

    def __init__(self, logdir: Path | str, start: int, steps: int):
        self._logdir = str(logdir)
        self._steps = range(start, start + steps)
        self._tracing = False
        self._annotation: jax.profiler.StepTraceAnnotation | None = None

    def step(self, step: int, in_flight: Any) -> None:
        """Call it before each step is dispatched.

        Args:
            step: the step about to run.
            in_flight: arrays that the steps before produce, such as the state; waited for where the
                trace begins and ends, so that it holds the named steps, whole, and nothing else.
        """
        if self._tracing:
            self._annotation.__exit__(None, None, None)
        if step in self._steps and not self._tracing:
            jax.block_until_ready(in_flight)
            self._start()
        elif step not in self._steps and self._tracing:
            self._stop(in_flight)
        if self._tracing:
            self._annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
            self._annotation.__enter__()

    def close(self, in_flight: Any = None) -> None:
        """Ends a trace that the run's end cuts short."""
        if self._tracing:
            self._annotation.__exit__(None, None, None)
            self._stop(in_flight)

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every Python call: bulky, and slows what it measures
        jax.profiler.start_trace(self._logdir, profiler_options=options)
        self._tracing = True

    def _stop(self, in_flight: Any) -> None:
        jax.block_until_ready(in_flight)
        jax.profiler.stop_trace()
        self._tracing = False
