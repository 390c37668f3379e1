"""Compile a step once, ahead of the loop. JAX refuses other arguments, and names the change."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from gpt2.utils import launch
from gpt2.utils.platform import jit_is_off

# XLA compiles without Python's lock, so this process can trace the next step meanwhile. A single
# thread keeps the order of compilations, which has to be the same in all processes of a run.
_compiler = ThreadPoolExecutor(1, "compile")


class CompiledStep:
    """A function that is compiled in the background, for one set of argument shapes.

    Every method waits until it is compiled, and raises the errors of its compilation.
    """

    def __init__(self, compiling: Future):
        self._compiling = compiling
        self._has_run = False

    def block_until_ready(self) -> "CompiledStep":
        """Wait until the function is compiled, as `jax.block_until_ready` does for arrays."""
        self._compiling.result()
        return self

    @property
    def compile_seconds(self) -> float:
        """Seconds that tracing and compiling took."""
        return self._compiling.result()[1]

    @property
    def peak_bytes(self) -> int:
        """Bytes of a device's memory that the program needs, arguments included, by XLA's count.

        It is 0 on platforms that do not report it.
        """
        if jit_is_off() or not (sizes := self._compiled.memory_analysis()):
            return 0
        arrays = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
        arrays -= sizes.alias_size_in_bytes  # outputs that reuse donated arguments
        return arrays + sizes.temp_size_in_bytes

    @property
    def _compiled(self) -> Any:
        return self._compiling.result()[0]

    def __call__(self, *arguments: Any) -> Any:
        """Run the program. Raise TypeError or ValueError for arguments that it was not made for."""
        outputs = self._compiled(*arguments)
        if not self._has_run:
            # In the first run cuDNN captures CUDA graphs, and fails if another thread uses the GPU.
            jax.block_until_ready(outputs)
            self._has_run = True
        return outputs

    def text(self) -> str:
        """Return the optimised program as HLO text."""
        return self._compiled.as_text()


# By the shape of a batch: the train step, and the norm-logging step.
Steps = dict[Any, tuple[CompiledStep, Callable]]


def compile_once(
    function: Any, *arguments: Any, options: dict[str, str] | None = None
) -> CompiledStep:
    """Trace a jitted or pmapped function for arguments or shapes, and start to compile it.

    `options` are XLA's compiler options.
    """
    began = time.perf_counter()
    lowered = None if jit_is_off() else function.lower(*arguments)

    def finish() -> tuple[Any, float]:
        compiled = lowered.compile(options) if lowered else function
        launch.release_free_memory()  # the compiler leaves hundreds of megabytes
        return compiled, time.perf_counter() - began

    return CompiledStep(_compiler.submit(finish))
