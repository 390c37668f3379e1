"""Compile a step once, before the training loop.

If a call passes an argument with another shape, dtype or structure, JAX raises an error that names
the argument.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from gpt2.errors import UserError, first_line
from gpt2.parallel import distributed
from gpt2.utils import launch
from gpt2.utils.platform import jit_is_off

# XLA compiles without holding Python's GIL, so the main thread can trace the next step meanwhile.
# A single thread compiles in the order of tracing, which is the same in all processes of a run.
_compiler = ThreadPoolExecutor(1, "compile")


class CompiledStep:
    """A function that is compiled in the background, for one set of argument shapes.

    Every method waits until the compilation is finished, and raises the errors that occurred in it.
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
        """The time from the start of tracing to the end of compilation, in seconds.

        It includes the wait for programs that are compiled earlier.
        """
        return self._compiling.result()[1]

    @property
    def peak_bytes(self) -> int:
        """The memory that the program needs on one device, in bytes, including its arguments.

        XLA estimates the number. It is 0 on platforms without an estimate, and without jit.
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
        """Run the program. Raise TypeError or ValueError if it was compiled for other arguments."""
        if self._has_run:
            return self._compiled(*arguments)
        outputs = run_alone(self._compiled, *arguments)
        self._has_run = True
        return outputs

    def text(self) -> str:
        """Return the optimised program as HLO text."""
        return self._compiled.as_text()


def run_alone(program: Callable, *arguments: Any) -> Any:
    """Run a program for the first time, and wait for its results.

    Other threads must not use the devices meanwhile: cuDNN captures a CUDA graph during the first
    run. Any other work on the GPU would make the capture fail, or be captured instead of being run.
    Raise a UserError if the program fails on an accelerator, unless the reason is a lack of memory
    or another process that has ended.
    """
    jax.block_until_ready(arguments)
    try:
        return jax.block_until_ready(program(*arguments))
    except jax.errors.JaxRuntimeError as error:
        is_too_large = "RESOURCE_EXHAUSTED" in str(error)
        is_on_cpu = jax.default_backend() == "cpu"
        if is_too_large or is_on_cpu or distributed.is_lost_peer(error):
            raise
        raise UserError(
            f"A compiled function failed when it first ran ({first_line(error)})",
            "Use attention without a library kernel: repeat the command with "
            "--config.model.attention=plain or, if it has no --config, set "
            '"attention": "plain" in the config.json of the workdir',
            exit_code=1,
        ) from error


# The train step, and the norm-logging step or None, for each shape of a batch.
CompiledSteps = dict[Any, tuple[CompiledStep, CompiledStep | None]]


def compile_once(
    function: Any, *arguments: Any, options: dict[str, str] | None = None
) -> CompiledStep:
    """Trace a jitted or pmapped function, and start to compile it in the background.

    `arguments` may be shapes instead of arrays. `options` are XLA's compiler options.
    """
    began = time.perf_counter()
    lowered = None if jit_is_off() else function.lower(*arguments)

    def finish() -> tuple[Any, float]:
        compiled = lowered.compile(options) if lowered else function
        launch.release_free_memory()  # hundreds of MB after a compilation
        return compiled, time.perf_counter() - began

    return CompiledStep(_compiler.submit(finish))
