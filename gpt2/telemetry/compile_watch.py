"""Compile once, ahead of the loop; a second compilation is an error that names what changed."""

import time
from collections.abc import Mapping
from typing import Any

from gpt2.utils.platform import jit_is_off


class RecompileError(RuntimeError):
    """A function that is compiled once was about to be compiled again."""


class CompiledStep:
    """A compiled function that takes the arguments it was compiled for, and no others.

    `peak_bytes` of a device are in use while it runs, arguments included, as XLA counts them.
    """

    def __init__(self, name: str, compiled: Any, seconds: float):
        self.name, self.compile_seconds, self._compiled = name, seconds, compiled
        self.peak_bytes = 0  # where the platform does not say
        if not jit_is_off() and (sizes := compiled.memory_analysis()):
            kept = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
            kept -= sizes.alias_size_in_bytes  # outputs that take the place of donated arguments
            self.peak_bytes = kept + sizes.temp_size_in_bytes

    def __call__(self, *arguments: Any) -> Any:
        """Runs it. Other arguments than those it was compiled for are a RecompileError."""
        try:
            return self._compiled(*arguments)
        except (TypeError, ValueError) as error:  # raised before it runs or takes a donation
            if jit_is_off():
                raise
            raise RecompileError(f"{self.name} would be compiled again. {error}") from error

    def text(self) -> str:
        """Returns the optimised program as HLO text."""
        return self._compiled.as_text()


def compile_once(
    function: Any, *arguments: Any, options: Mapping[str, str] | None = None
) -> CompiledStep:
    """Compiles a jitted or pmapped function for these arguments or shapes, with options of XLA."""
    began = time.perf_counter()
    lowered = None if jit_is_off() else function.lower(*arguments)
    compiled = lowered.compile(dict(options or {})) if lowered else function
    return CompiledStep(function.__name__, compiled, time.perf_counter() - began)
