"""What a compiled step sends over the network, read from its text (HLO)."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from gpt2.utils.text import format_bytes

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction."""

    kind: str
    group: tuple[
        int, ...
    ]  # devices that take part together, of the first group if several
    bytes: int  # of the whole array, gathered or not yet scattered, each time it runs
    times: int = 1  # how often it runs per call of the program
    loop_unknown: bool = (
        False  # it runs in a loop of unknown length, of which `times` is one turn
    )
    asynchronous: bool = False  # it has a start and an end
    overlapped: bool = False  # a matrix product, however short, runs between them

    @property
    def bytes_sent(self) -> float:
        """Bytes that each device sends per call of the program, by the ring algorithms.

        An all-reduce is a reduce-scatter and an all-gather, each of which passes every shard but
        one on (Thakur, Rabenseifner and Gropp 2005, sections 4.1 and 4.4).
        """
        share = (len(self.group) - 1) / len(self.group)
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(
            self.kind, share
        )
        return factor * self.bytes * self.times


def collectives(text: str) -> list[Collective]:
    """Returns the collectives of a program as HLO, without those of a device with itself."""
    # The line that names the module tells how many devices there are.
    sizes = re.findall(
        r"(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0]
    )
    num_devices = math.prod(map(int, sizes))
    computations, entry = split_computations(text)
    found = []

    # `after` are the lines after the call of the computation.
    def walk(name: str, times: int, unknown: bool, after: list[str]) -> None:
        lines = computations[name]
        for i, line in enumerate(lines):
            if _CHAIN in line and not _starts_chain(lines):
                continue  # a part of a collective that has been counted
            if match := _INSTRUCTION.search(line):
                result, kind, start = match.groups()
                group = _first_group(line, kind, num_devices)
                size = _whole_bytes(result, kind, start, len(group))
                if name.startswith(_TPU_REDUCE_SCATTER) and kind == "all-reduce":
                    kind = "reduce-scatter"
                during = _until_done(line, lines[i + 1 :], after, computations)
                overlapped = any(_has_product(x, computations) for x in during)
                asynchronous = start is not None or _CHAIN in line
                found.append(
                    Collective(
                        kind, group, size, times, unknown, asynchronous, overlapped
                    )
                )
                continue
            is_loop = " while(" in line
            turns = _turns_of(line, computations) if is_loop else 1
            for called in called_by(line):
                rest = [] if is_loop else lines[i + 1 :]
                walk(called, times * (turns or 1), unknown or turns is None, rest)

    walk(entry, 1, False, [])
    return [each for each in found if len(each.group) > 1]


def describe_collectives(found: Sequence[Collective]) -> dict[str, str]:
    """Returns a row per kind of collective: how many, how much is sent, and beside products."""
    rows = {}
    asynchronous = any(c.asynchronous for c in found)
    for kind in [kind for kind in KINDS if any(c.kind == kind for c in found)]:
        members = [c for c in found if c.kind == kind]
        sent = sum(c.bytes_sent for c in members)
        overlapped = sum(c.bytes_sent for c in members if c.overlapped)
        size = format_bytes(sum(c.bytes * c.times for c in members))
        rows[kind] = (
            f"{sum(c.times for c in members)} of {size} in all, {format_bytes(sent)} sent"
        )
        rows[kind] += f", {overlapped / sent:.0%} overlapped" if asynchronous else ""
    if any(c.loop_unknown for c in found):
        rows["loops"] = "some have no known length: what they send is counted once"
    return rows or {"collectives": "none"}


_ARRAY = re.compile(r"\b([a-z]+[0-9]+[a-z0-9]*|pred)\[([0-9,]*)\]")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|true_computation|false_computation|called_computations"
    r"|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_INSTRUCTION = re.compile(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(")
_CHAIN = (
    "chain_id="  # in what a TPU's compiler writes of a collective in several fusions
)
# A reduce-scatter of a TPU is a fusion that holds an all-reduce, and slices.
_TPU_REDUCE_SCATTER = "all-reduce-scatter"


def _until_done(
    line: str, rest: list[str], after: list[str], computations: dict[str, list[str]]
) -> list[str]:
    """Returns the lines that run while a collective does; none if it is not asynchronous."""
    if chain := re.search(
        rf'{_CHAIN}"\d+"', line
    ):  # of a TPU: other fusions continue it
        return [
            other
            for other in after
            for called in called_by(other)
            if any(chain[0] in x for x in computations.get(called, ()))
        ]
    name = re.match(r"\s*(?:ROOT )?(%?[\w.\-]+) = ", line)
    if "-start(" not in line or name is None:
        return []
    end = re.compile(rf"-done\(.*{re.escape(name[1])}\)")
    return rest[: next((i for i, other in enumerate(rest) if end.search(other)), 0)]


def _has_product(line: str, computations: dict[str, list[str]], depth: int = 3) -> bool:
    """Returns whether an instruction multiplies matrices, by itself or in what it calls."""
    if re.search(r" (dot|convolution)\(|__cublas|__cudnn|tpu_custom_call", line):
        return True
    return depth > 0 and any(
        _has_product(inner, computations, depth - 1)
        for called in called_by(line)
        for inner in computations.get(called, ())
    )


def _starts_chain(lines: list[str]) -> bool:
    """Returns whether a fusion of a TPU starts a collective that others, which name it, continue.

    It returns a tuple of what it has begun.
    """
    return re.search(r"= \(.*\) custom-call\(", _root(lines)) is not None


def _root(lines: Sequence[str]) -> str:
    return next((line for line in lines if line.lstrip().startswith("ROOT")), "")


def _whole_bytes(result: str, kind: str, start: str | None, group: int) -> int:
    """Returns the bytes of the whole array, from the shape of an instruction's result."""
    sizes = _array_bytes(result)
    if kind == "reduce-scatter" and not start:
        return sum(sizes) * group  # the result is a device's part
    if not start:
        return sum(sizes)
    if kind in ("all-gather", "reduce-scatter"):
        return sum(sizes) * group // (group + 1)  # operands are part of the result
    if kind == "all-to-all":
        return sum(sizes) // 2  # here too
    # Here too, with two words of state.
    return sizes[0] if kind == "collective-permute" else sum(sizes)


def _first_group(line: str, kind: str, num_devices: int) -> tuple[int, ...]:
    """Returns the first group of devices, which HLO writes in one of four ways."""
    if kind == "collective-permute":  # {{0,1},{1,0}}: who sends to whom
        pairs = re.findall(
            r"\{(\d+),(\d+)\}", line.partition("source_target_pairs=")[2]
        )
        return next(((int(a), int(b)) for a, b in pairs if a != b), (0,))
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return _integers(listed[1])
    if iota := re.search(rf"replica_groups=(\[[\d,]+\]){_IOTA}", line):
        return tuple(
            _device_ids(*iota.groups()[1:]).reshape(_integers(iota[1]))[0].tolist()
        )
    mesh = re.search(
        r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}", line
    )
    if mesh is None:  # {}: all together
        return tuple(range(num_devices))
    axes, order, used = mesh.groups()
    sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    written = re.fullmatch(_ORDER, order or "")
    devices = _device_ids(*written.groups()) if written else np.arange(num_devices)
    # An axis may be used in part: 'a':(2)4 is the 4 when a is taken as 2 x 4 x the rest.
    index = {axis: [0] for axis in sizes}
    for axis, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", used):
        stride = sizes[axis] // (int(before) * int(size)) if before else 1
        index[axis] = list(range(0, stride * int(size or sizes[axis]), stride))
    ids = devices.reshape(tuple(sizes.values()))
    return tuple(ids[np.ix_(*index.values())].ravel().tolist())


_IOTA = r"<=(\[[\d,]+\])(?:T(\([\d,]+\)))?"  # [4,2]<=[2,4]T(1,0)
_ORDER = r"(\[[\d,]+\])(?:T(\([\d,]+\)))?"


def _device_ids(shape: str, transpose: str | None) -> np.ndarray:
    ids = np.arange(math.prod(_integers(shape))).reshape(_integers(shape))
    return ids.transpose(_integers(transpose)) if transpose else ids


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def split_computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Returns the lines of every computation by name, and the name of the entry."""
    computations: dict[str, list[str]] = {}
    entry = ""
    current = None
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            current = computations.setdefault(header.group(2), [])
            entry = header.group(2) if header.group(1) else entry
        elif current is not None:
            current.append(line)
    return computations, entry


def called_by(line: str) -> list[str]:
    """Returns the names of the computations that an instruction calls."""
    return [
        name.strip("%{} ")
        for group in _CALLED.findall(line)
        for name in group.split(",")
    ]


def _turns_of(line: str, computations: Mapping[str, Sequence[str]]) -> int | None:
    """Returns how often the loop of a `while` instruction runs, or None.

    Programs for TPUs do not say it. There the condition compares the number of the turn, which
    `lax.scan` counts from 0, to a constant.
    """
    if trips := _TRIP_COUNT.search(line):
        return int(trips[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    lines = computations.get(condition[1], []) if condition else []
    limit = re.search(
        r" compare\(%?[\w.\-]+, %?([\w.\-]+)\), direction=LT", _root(lines)
    )
    if limit is None:
        return None
    value = re.search(
        rf"%?{re.escape(limit[1])} = .* constant\((\d+)\)", "\n".join(lines)
    )
    return int(value[1]) if value else None


def _array_bytes(shape: str) -> list[int]:
    """Returns the bytes of each array of a shape: `f32[2,3]`, or a tuple's, `(pred[], bf16[8])`."""
    sizes = []
    for dtype, dims in _ARRAY.findall(shape):
        bits = (
            8 if dtype == "pred" else _integers(dtype)[0]
        )  # f32, bf16, u8, f8e4m3fn, s4
        sizes.append(bits * math.prod(_integers(dims)) // 8)
    return sizes
