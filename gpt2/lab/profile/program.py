"""What the operations of a compiled step are: part of the model, kind, path."""

import re
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gpt2.lab.plan.hlo import Hlo

# The named scopes of the model and of the step.
SCOPES = ("attention", "mlp", "head", "optimizer")
# Kind of an operation: the first whose pattern one of its instructions has.
_KINDS = {
    "product": r" (dot|convolution)\(|__cublas|__cudnn\$fmha|__onednn\$matmul",
    "collective": r" (all-(reduce|gather|to-all)|reduce-scatter|collective-\w+)[\w-]*\(",
    "reduction": r" reduce(-window)?\(",
    "fusion": r" (fusion|call)\(",
    "copy": r" (copy|transpose|reshape|concatenate|pad|[\w-]*slice|gather|convert)[\w-]*\(",
}
# Levels of an operation's path that JAX or the trainer add, and that name no part of the model.
_WRAPPER = re.compile(
    r"(jit|jvp|transpose|vmap|pjit|remat|checkpoint|custom_\w+|shard_map|pmap)\(|GPT\b|h_\d+$|h$"
    r"|(while|body|cond|closed_call|checkpoint|rematted_computation|shard_map|scan|branch_\d+\w*)$"
)
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = ")
_CONTAINER = re.compile(r" (while|call|conditional)\(")
# A library's kernel by its name -> what the instruction holds that it runs for.
_LIBRARIES = {
    "nvjet|.*(gem[mv]|cutlass)": "__cublas",
    ".*cudnn": "__cudnn$",
    "memcpy": " copy(",
}
_HELPER = re.compile(r"Memset|.*splitKreduce")  # of the kernel beside it


class Operation(NamedTuple):
    """An instruction that a device runs by itself."""

    kind: str = "other"  # of `_KINDS`
    # A scope or module, with `forward` or `backward` if differentiated.
    part: str = "unknown"
    path: str = ""  # in JAX, its last levels: modules, and the primitive


class ProgramText:
    """A compiled program, read from its optimised HLO, as `CompiledStep.text()` gives it.

    Its name is `module`, which a trace gives too.
    """

    def __init__(self, text: str):
        self.module = text.partition(",")[0].removeprefix("HloModule ")
        self._hlo = Hlo(text)
        self._lines = {}
        for line in text.splitlines():
            name = _INSTRUCTION.match(line)
            if name:
                self._lines[name[1]] = line

    def is_container(self, name: str) -> bool:
        """Returns whether this is a loop or a call, whose time is that of operations inside."""
        line = self._lines.get(name, f" {name.partition('.')[0]}(")
        # XLA:CPU compiles a small loop into one kernel.
        return bool(_CONTAINER.search(line)) and 'xla_cpu_small_call="true"' not in line

    def find(self, name: str) -> Operation:
        """Returns the operation of a name; one of an unknown part if there is none."""
        if name not in self._lines:
            return Operation()
        line = self._lines[name]
        inside = list(self._inside(line))
        kind = "other"
        for each, pattern in _KINDS.items():
            if re.search(pattern, "\n".join(inside)):
                kind = each
                break
        part = part_of(line)
        if part == "other":
            # XLA names some fusions by nothing of the model: then the commonest inside.
            named = [part_of(each) for each in inside]
            named = [each for each in named if not each.startswith("other")]
            part = statistics.mode(named or [part])
        levels = _path(line).split("/")
        return Operation(kind, part, "/".join(levels[-3:]))

    def place(self, kernels: Iterable[str]) -> Iterator[str]:
        """Yields which instruction each kernel of CUDA graphs ran for, or else its own name.

        A graph tells names alone, such as `loop_add_fusion_3`, which several fusions share. Kernels
        run in the order of the text, so each belongs to the next instruction that fits.
        """
        order = list(self._schedule(self._hlo.entry))
        places: defaultdict[str, list[int]] = defaultdict(list)
        for i, name in enumerate(order):
            places[name.partition(".")[0]].append(i)
            inside = "".join(self._inside(self._lines[name]))
            for sign in _LIBRARIES.values():
                if sign in inside:
                    places[sign].append(i)
        at = latest = -1
        for kernel in kernels:
            key = re.sub(r"_\d+$", "", kernel)
            if key not in places:
                for pattern, sign in _LIBRARIES.items():
                    if re.match(pattern, kernel):
                        key = sign
                        break
            fitting = places[key]
            stays = _HELPER.match(kernel) or (key == "__cudnn$" and at in fitting)
            if fitting and not stays:
                latest = fitting[bisect_right(fitting, at) % len(fitting)]
                if key != " copy(":  # graphs copy early what they can
                    at = latest
            is_placed = latest >= 0 and (stays or fitting)
            yield order[latest] if is_placed else kernel

    def _schedule(self, computation: str) -> Iterator[str]:
        """Yields the instructions in their order, those of a loop as often as it turns."""
        for line in self._hlo.computations[computation]:
            loop = re.search(r"body=%?([\w.\-]+)", line)
            name = _INSTRUCTION.match(line)
            if loop:
                inside = list(self._schedule(loop[1]))
                for _ in range(self._hlo.turns(line) or 1):
                    yield from inside
            elif name:
                yield name[1]

    def _inside(self, line: str) -> Iterator[str]:
        """Yields the line of an instruction, and those that are fused into it."""
        yield line
        if " fusion(" in line or " async-start(" in line:
            for inner in self._hlo.inside(line):
                yield from self._inside(inner)


def part_of(line: str) -> str:
    """Returns the part of the model that an instruction belongs to: see `Operation`.

    Its line of HLO holds the path in JAX, `op_name`: scopes, modules, `transpose` in reverse mode.
    """
    path = _path(line)
    levels = path.split("/")
    # What is computed again belongs to the backward pass, which needs it.
    is_backward = "transpose(" in path or "rematted_computation" in path
    modules = [
        level
        for level in levels[1:-1]
        if level and "->" not in level and not _WRAPPER.match(level)
    ]
    scopes = [each for each in SCOPES if each in levels]
    scope = [*scopes, *modules, "other"][0]
    if scope == "optimizer" or "jvp(" not in path:
        return scope
    if is_backward:
        return f"{scope} backward"
    return f"{scope} forward"


def _path(line: str) -> str:
    # XLA joins several as `a/b;a/c`, or behind what they share as `a/(b:c)`: the first one.
    found = re.search(r'op_name="([^";]*)', line)
    if found is None:
        return ""
    return re.sub(r"/\(([^:]*):.*", r"/\1", found[1])
