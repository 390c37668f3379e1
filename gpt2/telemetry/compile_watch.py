"""Compile once, ahead of the loop; a second compilation is an error that names what changed."""

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax

_CACHE_HIT = "/jax/compilation_cache/cache_hits"
_SHOWN = 8  # changed leaves that an error names


class RecompileError(RuntimeError):
    """A function that is compiled once was about to be compiled again."""


@contextlib.contextmanager
def _count_cache_hits() -> Iterator[Counter[str]]:
    """Counts, under `_CACHE_HIT`, the programs that the persistent compilation cache supplies."""
    events: Counter[str] = Counter()

    def count(event: str, **_: str | int) -> None:
        events[event] += 1

    jax.monitoring.register_event_listener(count)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_listener(count)


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """The memory of one device that a compiled program takes, in bytes, by XLA's own account."""

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
        from_cache: whether the persistent compilation cache had it.
        flops: per call and device by XLA's account, which does not see into custom calls; None if
            the platform does not say.
        memory: `MemoryUse`, or None if the platform does not say.
    """

    def __init__(self, name: str, compiled: Any, arguments: tuple, seconds: float, cached: bool):
        self.name = name
        self.compile_seconds, self.from_cache = seconds, cached
        self._compiled, self._expected = compiled, _describe(arguments)
        cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
        self.flops: float | None = cost.get("flops") if cost else None
        self.memory = memory and MemoryUse(
            memory.argument_size_in_bytes,
            memory.output_size_in_bytes,
            memory.alias_size_in_bytes,
            memory.temp_size_in_bytes,
        )

    def __call__(self, *arguments: Any) -> Any:
        """Runs the compiled function and returns its result.

        Raises:
            RecompileError: the arguments differ from those it was compiled for.
        """
        # The executable compares the arguments itself, and refuses before it runs or takes a
        # donation. The differences are looked for only then.
        try:
            return self._compiled(*arguments)
        except (TypeError, ValueError) as error:
            changes = _differences(self._expected, _describe(arguments))
            if not changes:
                raise
            shown = changes[:_SHOWN]
            if len(changes) > _SHOWN:
                shown.append(f"and {len(changes) - _SHOWN} more")
            message = "\n  ".join([f"{self.name} would be compiled again:", *shown])
            raise RecompileError(message) from error

    def text(self) -> str:
        """Returns the optimised program as HLO text."""
        return self._compiled.as_text()


def compile_once(
    function: Any, *arguments: Any, name: str = "", options: Mapping[str, str] | None = None
) -> CompiledStep:
    """Compiles a `jax.jit` or `jax.pmap` function for these arguments, and for no others.

    Args:
        function: has `lower`.
        *arguments: arrays, or `jax.ShapeDtypeStruct`s with shardings; nothing runs.
        name: for messages; the function's own name if left out.
        options: of XLA's compiler.
    """
    with _count_cache_hits() as events:
        began = time.perf_counter()
        compiled = function.lower(*arguments).compile(dict(options or {}))
        seconds = time.perf_counter() - began
    name = name or getattr(function, "__name__", "function")
    return CompiledStep(name, compiled, arguments, seconds, cached=events[_CACHE_HIT] > 0)


def _describe(arguments: tuple) -> dict[str, tuple[str, Any, int]]:
    """Maps each leaf's path to its abstract value, its sharding (None: anywhere) and its rank."""
    described = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
        aval = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
        shape = ",".join(map(str, aval.shape))
        # An uncommitted array goes wherever it is needed, so its sharding says nothing.
        committed = isinstance(leaf, jax.ShapeDtypeStruct) or getattr(leaf, "committed", False)
        sharding = leaf.sharding if committed else None
        key = f"argument {path[0].idx}{jax.tree_util.keystr(path[1:])}"
        described[key] = (f"{aval.dtype}[{shape}]", sharding, len(aval.shape))
    return described


def _differences(expected: dict, given: dict) -> list[str]:
    changes = [f"{path}: missing" for path in expected if path not in given]
    for path, (aval, sharding, rank) in given.items():
        if path not in expected:
            changes.append(f"{path}: new, {aval}")
            continue
        old_aval, old_sharding, _ = expected[path]
        if aval != old_aval:
            changes.append(f"{path}: compiled for {old_aval}, called with {aval}")
        elif sharding and old_sharding and not sharding.is_equivalent_to(old_sharding, rank):
            changes.append(f"{path}: compiled for {old_sharding}, called with {sharding}")
    return changes
