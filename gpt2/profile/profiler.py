"""A trace of a few steps, and the page that says where their time goes."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from gpt2.errors import warn
from gpt2.profile.machine import Machine
from gpt2.profile.page import MACHINE, PROGRAM, write_page
from gpt2.profile.program import ProgramText
from gpt2.profile.sampler import Sampler
from gpt2.profile.trace import STEP
from gpt2.utils.files import write_text


class Profiler:
    """Traces the steps `start` to `start + steps - 1`; a context manager.

    TensorBoard's profiler and Perfetto read the trace too.

    Args:
        logdir: where the trace goes, and the page.
        start: the first step in the trace.
        steps: how many; 0: no trace.
        text: returns the compiled step, as HLO.
    """

    def __init__(self, logdir: Path | str, start: int, steps: int, text: Callable[[], str]):
        self._logdir, self._text = Path(logdir), text
        self._steps = range(start, start + steps)
        self._tracing = self._has_trace = False
        self._annotation = contextlib.ExitStack()  # of the step under way
        self._sampler = contextlib.ExitStack()

    def waits_at(self, step: int) -> bool:
        """Returns whether `step` would wait for earlier steps: where the trace begins or ends."""
        return (step in self._steps) != self._tracing

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
            self._annotation.enter_context(jax.profiler.StepTraceAnnotation(STEP, step_num=step))

    def close(self, in_flight: Any = None) -> None:
        """Ends a trace that the run's end cuts short, and writes the page.

        The page waits for the end of the loop, where no other process waits for this one.
        """
        if self._tracing:
            self._annotation.close()
            self._stop(in_flight)
        if self._has_trace and jax.process_index() == 0:
            self._explain()
        self._has_trace = False

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every Python call: bulky, and slows what it measures
        index = jax.process_index()  # processes of one host would write to one file
        logdir = self._logdir / f"process_{index}" if index else self._logdir
        jax.profiler.start_trace(str(logdir), profiler_options=options)
        self._sampler.enter_context(Sampler())
        self._tracing = True

    def _stop(self, in_flight: Any) -> None:
        jax.block_until_ready(in_flight)
        self._sampler.close()
        jax.profiler.stop_trace()
        self._tracing = False
        self._has_trace = True

    def _explain(self) -> None:
        """Writes the page, and beside the trace what `python -m gpt2.profile` needs for it."""
        try:
            text = self._text()
            write_text(self._logdir / PROGRAM, text)
            dtypes = {operation.dtype for operation in ProgramText(text).operations.values()}
            Machine.here(dtypes).save(self._logdir / MACHINE)
            print(write_page(self._logdir))
        except Exception as error:  # a run is worth more than its page
            warn(f"there is no profile.md ({error})")
