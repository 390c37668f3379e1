"""A trace of a few steps, for TensorBoard's profiler or Perfetto."""

import contextlib
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
        self._annotation = contextlib.ExitStack()  # of the step under way

    def step(self, step: int, in_flight: Any) -> None:
        """Begins or ends the trace where that is due. Call it before each step is dispatched.

        Args:
            step: the step about to run.
            in_flight: arrays that earlier steps produce, such as the state. The trace waits for
                them where it begins and ends, so that it holds exactly the named steps.
        """
        self._annotation.close()
        if step in self._steps and not self._tracing:
            jax.block_until_ready(in_flight)
            self._start()
        elif step not in self._steps and self._tracing:
            self._stop(in_flight)
        if self._tracing:
            self._annotation.enter_context(jax.profiler.StepTraceAnnotation("train", step_num=step))

    def close(self, in_flight: Any = None) -> None:
        """Ends a trace that the run's end cuts short."""
        if self._tracing:
            self._annotation.close()
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
