"""Compile once, ahead of the loop: JAX refuses other arguments, and names what changed."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from gpt2.utils import launch
from gpt2.utils.platform import jit_is_off

# XLA needs no Python, which traces the next step meanwhile. One thread: processes of a run compile
# in the same order.
_compiler = ThreadPoolExecutor(1, "compile")


class CompiledStep:
    """A function that is being compiled, for the arguments that it will take, and no others.

    Whatever asks it for something waits, and gets the errors of its compilation.
    """

    def __init__(self, compiling: Future):
        self._compiling = compiling
        self._has_run = False

    def block_until_ready(self) -> "CompiledStep":
        """Waits until it is compiled, as `jax.block_until_ready` does for arrays."""
        self._compiling.result()
        return self

    @property
    def compile_seconds(self) -> float:
        """What tracing and compiling took."""
        return self._compiling.result()[1]

    @property
    def peak_bytes(self) -> int:
        """Bytes of a device in use while it runs, arguments included, as XLA counts them.

        0 where the platform does not say.
        """
        if jit_is_off() or not (sizes := self._compiled.memory_analysis()):
            return 0
        kept = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
        # Outputs that take the place of donated arguments.
        kept -= sizes.alias_size_in_bytes
        return kept + sizes.temp_size_in_bytes

    @property
    def _compiled(self) -> Any:
        return self._compiling.result()[0]

    def __call__(self, *arguments: Any) -> Any:
        """Runs it. Other arguments than those it was compiled for are a TypeError or ValueError."""
        outputs = self._compiled(*arguments)
        if not self._has_run:
            # cuDNN captures graphs of its own in the first run, beside which nothing may run.
            jax.block_until_ready(outputs)
            self._has_run = True
        return outputs

    def text(self) -> str:
        """Returns the optimised program as HLO text."""
        return self._compiled.as_text()


# By shape: the train step, and the watch.
Steps = dict[Any, tuple[CompiledStep, Callable]]


def compile_once(
    function: Any, *arguments: Any, options: dict[str, str] | None = None
) -> CompiledStep:
    """Traces a jitted or pmapped function for these arguments or shapes, and starts to compile it.

    `options` are XLA's.
    """
    began = time.perf_counter()
    lowered = None if jit_is_off() else function.lower(*arguments)

    def finish() -> tuple[Any, float]:
        compiled = lowered.compile(options) if lowered else function
        launch.release_free_memory()  # hundreds of megabytes that the compiler used
        return compiled, time.perf_counter() - began

    return CompiledStep(_compiler.submit(finish))
