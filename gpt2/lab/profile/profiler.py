"""A trace of a few steps, and the page that says where their time goes."""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import chex
import jax

from gpt2.config import LoggingConfig
from gpt2.errors import log, warn
from gpt2.lab.profile.page import PAGE, PROGRAM, explain
from gpt2.lab.profile.trace import STEP
from gpt2.utils.files import write_text


class Profiler:
    """Traces `profile_steps` steps from `profile_start` on, until it is closed.

    `logdir` takes the trace and its page.
    """

    def __init__(self, logdir: Path | str, options: LoggingConfig):
        self._logdir = Path(logdir)
        start = options.profile_start
        self._steps = range(start, start + options.profile_steps)
        self._tracing = False
        self._has_trace = False
        self._trace = contextlib.ExitStack()
        self._annotation = contextlib.ExitStack()  # of a step

    def step(
        self,
        step: int,
        in_flight: chex.ArrayTree,
        text: Callable[[], str],
    ) -> None:
        """Begins or ends the trace where `step`, the next to be dispatched, is its first or last.

        It then waits for the arrays `in_flight` of earlier steps: a trace holds whole steps. `text`
        returns the compiled step as HLO, which the page needs of the first one.
        """
        self._annotation.close()
        is_traced = step in self._steps
        if is_traced != self._tracing:
            jax.block_until_ready(in_flight)
            self._tracing = is_traced
            if is_traced:
                self._text = text
                self._start()
            else:
                self._trace.close()
        if is_traced:
            annotation = jax.profiler.StepTraceAnnotation(STEP, step_num=step)
            self._annotation.enter_context(annotation)

    def close(self, in_flight: chex.ArrayTree) -> None:
        """Ends a trace that the run's end cuts short, and writes the page of any trace."""
        if self._tracing:
            self._annotation.close()
            jax.block_until_ready(in_flight)
            self._trace.close()
        if not self._has_trace or jax.process_index():
            return
        try:
            write_text(self._logdir / PROGRAM, self._text())
            page = explain(self._logdir)
            write_text(self._logdir / PAGE, page)
            cause = page.splitlines()[2].replace("**", "")
            log(f"{cause} See {self._logdir / PAGE}", sys.stdout)
        except Exception as error:  # a run is worth more than its page
            warn(f"there is no profile.md ({error})")

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        # Not every Python call: bulky, and slows what it measures.
        options.python_tracer_level = 0
        logdir = self._logdir
        if jax.process_index():  # processes of one host would write to one file
            logdir = logdir / f"process_{jax.process_index()}"
        trace = jax.profiler.trace(logdir, profiler_options=options)
        self._trace.enter_context(trace)
        self._has_trace = True
