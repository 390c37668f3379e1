"""Compile once, ahead of the loop; a second compilation is an error that names what changed."""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax


class RecompileError(RuntimeError):
    """A function that is compiled once was about to be compiled again."""


class MemoryUse(NamedTuple):
    """Bytes of one device that a compiled program takes, as XLA counts them."""

    arguments: int
    outputs: int
    aliased: int  # outputs that reuse the memory of donated arguments
    temporaries: int

    @property
    def peak(self) -> int:
        """Bytes in use while it runs, arguments included."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


class CompiledStep:
    """A compiled function that takes the arguments it was compiled for, and no others.

    Attributes:
        name: for messages.
        compile_seconds: tracing, lowering and compiling.
        memory: `MemoryUse`, or None if the platform does not say.
    """

    def __init__(self, name: str, compiled: Any, seconds: float):
        self.name, self.compile_seconds, self._compiled = name, seconds, compiled
        sizes = [f"{kind}_size_in_bytes" for kind in ("argument", "output", "alias", "temp")]
        memory = None if jax.config.jax_disable_jit else compiled.memory_analysis()
        self.memory = memory and MemoryUse(*(getattr(memory, size) for size in sizes))

    def __call__(self, *arguments: Any) -> Any:
        """Runs the compiled function and returns its result.

        Raises:
            RecompileError: the arguments differ from those it was compiled for, as JAX names it.
        """
        if jax.config.jax_disable_jit:
            return self._compiled(*arguments)
        try:
            return self._compiled(*arguments)
        except (TypeError, ValueError) as error:  # raised before it runs or takes a donation
            raise RecompileError(f"{self.name} would be compiled again. {error}") from error

    def text(self) -> str:
        """Returns the optimised program as HLO text."""
        return self._compiled.as_text()


def compile_once(
    function: Any, *arguments: Any, name: str = "", options: Mapping[str, str] | None = None
) -> CompiledStep:
    """Compiles a `jax.jit` or `jax.pmap` function for these arguments, and for no others.

    Arguments are arrays, or `jax.ShapeDtypeStruct`s with shardings: nothing runs. `options` are
    those of XLA's compiler.
    """
    began = time.perf_counter()
    compiled = function  # what people debug with prints runs operation by operation
    if not jax.config.jax_disable_jit:
        compiled = function.lower(*arguments).compile(dict(options or {}))
    name = name or getattr(function, "__name__", "function")
    return CompiledStep(name, compiled, time.perf_counter() - began)
