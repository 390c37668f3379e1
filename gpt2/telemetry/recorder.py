"""Record a trace of a few training steps with JAX's profiler."""

import sys
from contextlib import AbstractContextManager
from pathlib import Path

import chex
import jax

from gpt2.config import LoggingConfig
from gpt2.errors import log
from gpt2.utils.stores import url_or_path

STEP = "train"  # the name of the trace annotation of each step on the host


class TraceRecorder(AbstractContextManager):
    """A hook that records a trace of `profile_steps` steps, beginning after step `profile_start`.

    Call it after each step. Each process writes its trace to `workdir/profile`, and `python -m
    gpt2.lab.profile` reads the trace of process 0. `start` is the step at which this process
    starts, more than 0 if the run is continued.
    """

    def __init__(self, workdir: Path, options: LoggingConfig, start: int = 0):
        self._workdir = workdir
        first = options.profile_start
        # The step after each of these steps is traced.
        self._before = range(first, first + options.profile_steps)
        self._start = start
        self._is_tracing = False

    def __enter__(self) -> "TraceRecorder":
        self(self._start, None)  # the first step may be traced as well
        return self

    def __call__(self, step: int, state: chex.ArrayTree) -> None:
        """Start or stop the trace, if it begins or ends directly after `step`.

        First wait for the arrays of `state`, the training state after this step. The trace then
        contains only complete steps, although devices run behind the host.
        """
        is_traced = step in self._before
        if is_traced == self._is_tracing:
            return
        jax.block_until_ready(state)
        if is_traced:
            self._begin()
        else:
            self._end()

    def __exit__(self, *exception: object) -> None:
        if self._is_tracing:
            self._end()

    def _begin(self) -> None:
        options = jax.profiler.ProfileOptions()
        # Events for all Python calls would make the trace large, and slow down the traced steps.
        options.python_tracer_level = 0
        folder = self._workdir / "profile"
        # Otherwise, processes on one host would write to the same file.
        if index := jax.process_index():
            folder /= f"process_{index}"
        jax.profiler.start_trace(folder, profiler_options=options)
        self._is_tracing = True

    def _end(self) -> None:
        jax.profiler.stop_trace()
        self._is_tracing = False
        if jax.process_index() == 0:
            workdir = url_or_path(self._workdir)
            log(
                f"to read the trace, run: python -m gpt2.lab.profile {workdir}",
                sys.stdout,
            )
