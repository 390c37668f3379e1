"""What the operations of a compiled step are: part of the model, kind, FLOPs and bytes."""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterator

from gpt2.profile.products import product_flops
from gpt2.profile.sampler import short_path
from gpt2.utils.hlo import (
    Instruction,
    arrays_in,
    bytes_of,
    called_by,
    parse_instruction,
    split_computations,
    turns_of,
)

# The named scopes of the model and of the step.
SCOPES = ("attention", "mlp", "head", "optimizer")
CONTAINERS = ("while", "call", "conditional")
_COLLECTIVE = re.compile(
    r"all-reduce|all-gather|reduce-scatter|all-to-all|collective-(permute|broadcast)"
)
# What an operation needs no time for, or what merely names a value.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "iota"),
}
_MOVES = {
    *("copy", "transpose", "reshape", "slice", "concatenate", "pad"),
    *("dynamic-slice", "dynamic-update-slice", "broadcast", "reverse", "gather", "convert"),
}
_SMALL_CALL = 'xla_cpu_small_call="true"'
_SLICES = ("dynamic-slice", "slice", "gather")
# Levels of an operation's path that JAX or the trainer add, and that name no part of the model.
_WRAPPER = re.compile(
    r"(jit|jvp|transpose|vmap|pjit|remat|checkpoint|custom_\w+|shard_map|pmap)\(|GPT\b|h_\d+$|h$"
    r"|(while|body|cond|closed_call|checkpoint|rematted_computation|shard_map|scan|branch_\d+\w*)$"
)


@dataclasses.dataclass(frozen=True)
class Operation:
    """An instruction that a device runs by itself.

    Attributes:
        name: of the instruction, which a trace gives too.
        kind: product, reduction, fusion, copy, collective, other, or loop: a small loop that
            XLA:CPU compiles into one kernel.
        part: a named scope such as `attention`, or a module outside all scopes.
        phase: forward, backward, or empty outside of differentiation.
        path: scopes and modules around it, and JAX's name for it; may be empty.
        source: FILE:LINE in Python, or empty.
        flops: of matrix products, each time it runs.
        dtype: of the operands of its products, as in HLO; empty without products.
        bytes: read and written, each time it runs.
        times: how often it runs per call of the program; loops of unknown length count once.
        loop: name of the innermost loop around it, or empty.
    """

    name: str
    kind: str
    part: str
    phase: str
    path: str
    source: str
    flops: float
    dtype: str
    bytes: int
    times: int
    loop: str


class ProgramText:
    """A compiled program, read from its text.

    Args:
        text: optimised HLO, from `CompiledStep.text()`.

    Attributes:
        module: its name, which a trace gives too.
        operations: by name.
        loops: FILE:LINE and turns (None: unknown) of each loop, by name.
        containers: names of loops and calls, whose time is that of operations inside.

    Raises:
        ValueError: this is no HLO text.
    """

    def __init__(self, text: str):
        header = re.match(r"HloModule ([\w.\-]+)", text)
        self._lines, entry = split_computations(text)
        if not header or not entry:
            raise ValueError("no HLO text")
        self.module = header[1]
        self._sources = _Sources(text)
        self._found = {
            name: [found for line in lines if (found := parse_instruction(line))]
            for name, lines in self._lines.items()
        }
        self._shapes = {i.name: i.shape for each in self._found.values() for i in each}
        self.operations: dict[str, Operation] = {}
        self.loops: dict[str, tuple[str, int | None]] = {}
        self.containers: set[str] = set()
        self._walk(entry, times=1, loop="", around=("other", ""))

    def _walk(self, computation: str, times: int, loop: str, around: tuple[str, str]) -> None:
        """Describes the operations of a computation; `around` is part and phase of its loop."""
        for instruction in self._found.get(computation, ()):
            name, turns = instruction.name, 1
            if instruction.opcode in _FREE:
                continue
            if instruction.opcode in CONTAINERS and _SMALL_CALL not in instruction.line:
                self.containers.add(name)
                inner, where = loop, around
                if instruction.opcode == "while":
                    inner, where = name, part_of(instruction.line)
                    known = turns_of(instruction.line, self._lines)
                    self.loops[name] = self._sources.find(instruction.line), known
                    turns = known or 1
                for called in called_by(instruction.line):
                    self._walk(called, times * turns, inner, where)
            elif name in self.operations:  # of a computation that is called twice
                operation = self.operations[name]
                again = dataclasses.replace(operation, times=operation.times + times)
                self.operations[name] = again
            else:
                self.operations[name] = self._describe(instruction, times, loop, around)

    def _describe(
        self, instruction: Instruction, times: int, loop: str, around: tuple[str, str]
    ) -> Operation:
        inside = list(self._inside(instruction))
        products = [(i, product_flops(i, self._shapes)) for i in inside]
        flops = sum(each for _, each in products)
        first = next((i for i, each in products if each), None)
        operands = arrays_in(self._shapes.get(first.operands[0], "")) if first else []
        part, phase = part_of(instruction.line)
        if part == "other":  # XLA names some fusions by nothing of the model
            names = Counter(part_of(i.line) for i in inside if "op_name=" in i.line)
            names.pop(("other", ""), None)
            part, phase = names.most_common(1)[0][0] if names else around
        return Operation(
            instruction.name,
            "loop"
            if _SMALL_CALL in instruction.line
            else _kind({i.opcode for i in inside}, flops > 0),
            part,
            phase,
            _path(instruction.line),
            self._sources.find(instruction.line),
            flops,
            operands[0][0] if operands else "",
            self._bytes(instruction),
            times,
            loop,
        )

    def _inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yields an instruction, and all those that are fused into it."""
        yield instruction
        if instruction.opcode in ("fusion", "async-start"):
            for called in called_by(instruction.line):
                for inner in self._found.get(called, ()):
                    yield from self._inside(inner)

    def _size(self, name: str) -> int:
        return sum(bytes_of(*array) for array in arrays_in(self._shapes.get(name, "")))

    def _bytes(self, instruction: Instruction) -> int:
        """Returns bytes read and written, each operand once; of a slice, those of the slice."""
        operands = list(dict.fromkeys(instruction.operands))
        if instruction.opcode.endswith("-done"):
            return 0  # its start has moved them
        if instruction.opcode.endswith("-start") and instruction.opcode != "all-reduce-start":
            return self._size(instruction.name)  # operands and results
        match instruction.opcode:
            case opcode if opcode in _SLICES:
                return 2 * self._size(instruction.name)
            case "dynamic-update-slice":
                return 2 * self._size(instruction.operands[1])
            case "fusion" if called := called_by(instruction.line):
                return self._fusion_bytes(instruction, self._found.get(called[0], []))
        return self._size(instruction.name) + sum(map(self._size, operands))

    def _fusion_bytes(self, fusion: Instruction, inside: list[Instruction]) -> int:
        users: dict[str, list[Instruction]] = {}
        for inner in inside:
            for operand in dict.fromkeys(inner.operands):
                users.setdefault(operand, []).append(inner)

        by_name = {i.name: i for i in inside}

        def source(use: Instruction) -> Instruction | None:
            """Returns the value that an instruction cuts from, or writes into."""
            found = by_name.get(use.operands[0])
            while found is not None and found.opcode == "bitcast":
                found = by_name.get(found.operands[0])
            return found

        def uses(name: str) -> list[Instruction]:
            found = [uses(i.name) if i.opcode == "bitcast" else [i] for i in users.get(name, [])]
            return [i for each in found for i in each]

        parameters = {
            int(found[1]): i for i in inside if (found := re.search(r" parameter\((\d+)\)", i.line))
        }
        read, seen = 0, set()
        for number, operand in enumerate(fusion.operands):
            parameter = parameters.get(number)
            if parameter is None or operand in seen:
                continue
            seen.add(operand)
            into = uses(parameter.name)
            if not into or any(source(i) is not parameter for i in into):
                read += self._size(operand)
            elif all(i.opcode in _SLICES for i in into):
                read += sum(self._size(i.name) for i in into)
            elif any(i.opcode != "dynamic-update-slice" for i in into):
                read += self._size(operand)
        updates = [i for i in inside if i.opcode == "dynamic-update-slice"]
        written = self._size(fusion.name)
        for update in updates:  # in place: the rest of the array stays as it is
            if self._size(update.name) <= written:
                written += self._size(update.operands[1]) - self._size(update.name)
        return read + written


def part_of(line: str) -> tuple[str, str]:
    """Returns the part of the model that an instruction belongs to, and the phase.

    Args:
        line: with the path of the operation in JAX, `op_name`, which holds named scopes, modules,
            and `transpose` for what reverse mode adds.

    Returns:
        The outermost of `SCOPES`, else a level of the path that is no wrapper, else `other`; and
        `forward`, `backward` or nothing.
    """
    path = _op_name(line)
    levels = path.split("/")
    is_differentiated = "jvp(" in path
    # What is computed again belongs to the backward pass, which needs it.
    is_backward = "transpose(" in path or "rematted_computation" in path
    scope = next((each for each in SCOPES if each in levels), None)
    if scope is None:
        named = (x for x in levels[1:-1] if x and not _WRAPPER.match(x) and "->" not in x)
        scope = next(named, "other")
    if scope == "optimizer" or not is_differentiated:
        return scope, ""
    return scope, "backward" if is_backward else "forward"


def _op_name(line: str) -> str:
    """Returns the path of an instruction in JAX; the first one where XLA has joined several.

    It writes those as `a/b;a/c`, or behind what they share as `a/(b:c)`.
    """
    path = (re.search(r'op_name="([^"]*)"', line) or ["", ""])[1].partition(";")[0]
    return re.sub(r"/\(([^:]*):.*", r"/\1", path)


def _path(line: str) -> str:
    """Returns the levels of an instruction's path that JAX has not added."""
    path = _op_name(line)
    named = [x for x in path.split("/") if re.match(r"h_\d+$", x) or not _WRAPPER.match(x)]
    return "/".join(dict.fromkeys(named))


def _kind(opcodes: set[str], has_product: bool) -> str:
    if has_product or opcodes & {"dot", "convolution"}:
        return "product"  # on a TPU it may hold a collective, which runs meanwhile
    if any(_COLLECTIVE.match(opcode) for opcode in opcodes):
        return "collective"
    if opcodes & {"reduce", "reduce-window"}:
        return "reduction"
    work = {opcode.removesuffix("-start").removesuffix("-done") for opcode in opcodes}
    work -= _FREE | {"fusion", "async"}
    if work <= _MOVES:
        return "copy"
    return "fusion" if "fusion" in opcodes else "other"


class _Sources:
    """Finds the line of Python behind an instruction, by the tables at the head of the text."""

    def __init__(self, text: str):
        tables = text.partition("\n%")[0]
        files = dict(re.findall(r'^(\d+) "(.*)"$', _table(tables, "FileNames"), re.M))
        places = re.findall(
            r"^(\d+) \{file_name_id=(\d+) .*?line=(\d+)", _table(tables, "FileLocations"), re.M
        )
        self._places = {number: (files.get(file, ""), line) for number, file, line in places}
        frames = re.findall(
            r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?",
            _table(tables, "StackFrames"),
            re.M,
        )
        # Parents are numbered from 1 higher than frames.
        self._frames = {int(n): (place, int(parent or 1) - 1) for n, place, parent in frames}
        self._named = functools.cache(self._name)

    def find(self, line: str) -> str:
        """Returns FILE:LINE of the innermost frame outside of libraries, or nothing."""
        number = re.search(r"stack_frame_id=(\d+)", line)
        return self._named(int(number[1])) if number else ""

    def _name(self, frame: int) -> str:
        while frame in self._frames:
            place, parent = self._frames[frame]
            file, line = self._places.get(place, ("", ""))
            if file and "site-packages" not in file:
                return f"{short_path(file)}:{line}"
            frame = parent if parent < frame else 0
        return ""


def _table(text: str, name: str) -> str:
    return text.partition(f"\n{name}\n")[2].partition("\n\n")[0]
