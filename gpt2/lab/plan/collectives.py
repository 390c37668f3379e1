"""What a compiled step sends over the network, read from its text (HLO)."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gpt2.lab.plan.hlo import Hlo, root
from gpt2.utils.text import format_bytes

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)


class Collective(NamedTuple):
    """One collective instruction."""

    kind: str
    # Devices that take part together, of the first group if there are several.
    group: tuple[int, ...]
    # Of the whole array, gathered or not yet scattered, each time it runs.
    bytes: int
    # How often it runs per call of the program.
    times: int = 1
    # It runs in a loop of unknown length, of which `times` is one turn.
    loop_unknown: bool = False
    # It has a start and an end, and a matrix product, however short, runs between them.
    overlapped: bool = False

    @property
    def bytes_sent(self) -> float:
        """Bytes that each device sends per call of the program, by the ring algorithms.

        An all-reduce is a reduce-scatter and an all-gather, each of which passes every shard but
        one on (Thakur, Rabenseifner and Gropp 2005, sections 4.1 and 4.4).
        """
        sent = float(self.bytes * self.times)
        if self.kind == "collective-permute":
            return sent
        if self.kind == "all-reduce":
            sent *= 2
        return sent * (len(self.group) - 1) / len(self.group)


def collectives(text: str) -> list[Collective]:
    """Returns the collectives of a program as HLO, without those of a device with itself."""
    # The line that names the module tells how many devices there are.
    header = text.partition("\n")[0]
    sizes = re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)
    num_devices = math.prod(map(int, sizes))
    hlo = Hlo(text)
    found: list[Collective] = []

    # `after` are the lines after the call of the computation.
    def walk(
        name: str,
        times: int,
        loop_unknown: bool,
        after: list[str],
    ) -> None:
        lines = hlo.computations[name]
        for i, line in enumerate(lines):
            # Of a TPU's collective in several fusions, the first counts: it returns a tuple of
            # what it has begun.
            if _CHAIN in line and not re.search(r"= \(.*\) custom-call\(", root(lines)):
                continue
            rest = lines[i + 1 :]
            match = _INSTRUCTION.search(line)
            if match:
                result, kind, start = match.groups()
                group = _first_group(line, kind, num_devices)
                size = _whole_bytes(
                    result,
                    kind,
                    start,
                    len(group),
                )
                if name.startswith(_TPU_REDUCE_SCATTER) and kind == "all-reduce":
                    kind = "reduce-scatter"
                during = _until_done(
                    hlo,
                    line,
                    rest,
                    after,
                )
                overlapped = any(_has_product(hlo, each) for each in during)
                found.append(
                    Collective(
                        kind,
                        group,
                        size,
                        times,
                        loop_unknown,
                        overlapped,
                    )
                )
            elif " while(" in line:
                turns = hlo.turns(line)
                for called in hlo.called_by(line):
                    unknown = loop_unknown or turns is None
                    walk(called, times * (turns or 1), unknown, [])
            else:
                for called in hlo.called_by(line):
                    walk(called, times, loop_unknown, rest)

    walk(hlo.entry, 1, False, [])
    return [each for each in found if len(each.group) > 1]


def describe_collectives(found: Sequence[Collective]) -> dict[str, str]:
    """Returns a row per kind of collective: how many, how much is sent, and beside products."""
    rows = {}
    for kind in KINDS:
        members = [each for each in found if each.kind == kind]
        if not members:
            continue
        number = sum(each.times for each in members)
        size = sum(each.bytes * each.times for each in members)
        sent = sum(each.bytes_sent for each in members)
        overlapped = sum(each.bytes_sent for each in members if each.overlapped)
        row = f"{number} of {format_bytes(size)} in all, {format_bytes(sent)} sent"
        if overlapped:
            row += f", {overlapped / sent:.0%} overlapped"
        rows[kind] = row
    if any(each.loop_unknown for each in found):
        rows["loops"] = "some have no known length: what they send is counted once"
    return rows or {"collectives": "none"}


_ARRAY = re.compile(r"\b([a-z]+[0-9]+[a-z0-9]*|pred)\[([0-9,]*)\]")
_INSTRUCTION = re.compile(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(")
# In what a TPU's compiler writes of a collective in several fusions.
_CHAIN = "chain_id="
# A reduce-scatter of a TPU is a fusion that holds an all-reduce, and slices.
_TPU_REDUCE_SCATTER = "all-reduce-scatter"


def _until_done(
    hlo: Hlo,
    line: str,
    rest: list[str],
    after: list[str],
) -> list[str]:
    """Returns the lines that run while a collective does; none if it is not asynchronous."""
    chain = re.search(rf'{_CHAIN}"\d+"', line)
    if chain:  # of a TPU: other fusions continue it
        return [
            other
            for other in after
            if any(chain[0] in inner for inner in hlo.inside(other))
        ]
    name = re.match(r"\s*(?:ROOT )?(%?[\w.\-]+) = .*-start\(", line)
    if name:
        end = re.compile(rf"-done\(.*{re.escape(name[1])}\)")
        for i, other in enumerate(rest):
            if end.search(other):
                return rest[:i]
    return []


def _has_product(hlo: Hlo, line: str, depth: int = 3) -> bool:
    """Returns whether an instruction multiplies matrices, by itself or in what it calls."""
    if re.search(r" (dot|convolution)\(|__cublas|__cudnn|tpu_custom_call", line):
        return True
    if not depth:
        return False
    return any(_has_product(hlo, inner, depth - 1) for inner in hlo.inside(line))


def _whole_bytes(
    result: str,
    kind: str,
    start: str | None,
    group: int,
) -> int:
    """Returns the bytes of the whole array, from the shape of an instruction's result.

    It is that of an array, `f32[2,3]`, or of a tuple of them, `(pred[], bf16[8])`.
    """
    sizes = []
    for dtype, dims in _ARRAY.findall(result):
        # Such as f32, bf16, u8, f8e4m3fn, s4.
        bits = 8 if dtype == "pred" else _integers(dtype)[0]
        sizes.append(bits * math.prod(_integers(dims)) // 8)
    size = sum(sizes)
    if not start:
        # The result of a reduce-scatter is a device's part.
        if kind == "reduce-scatter":
            return size * group
        return size
    # What has started returns its operands too, and a permutation two words of state.
    if kind in ("all-gather", "reduce-scatter"):
        return size * group // (group + 1)
    if kind == "all-to-all":
        return size // 2
    if kind == "collective-permute":
        return sizes[0]
    return size


def _first_group(line: str, kind: str, num_devices: int) -> tuple[int, ...]:
    """Returns the first group of devices, which HLO writes in one of four ways."""
    if kind == "collective-permute":  # {{0,1},{1,0}}: who sends to whom
        sends = line.partition("source_target_pairs=")[2]
        for pair in re.findall(r"\{(\d+,\d+)\}", sends):
            a, b = _integers(pair)
            if a != b:
                return a, b
        return (0,)
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return _integers(listed[1])
    iota = re.search(rf"replica_groups=(\[[\d,]+\])<={_ORDER}", line)
    if iota:
        ordered = _device_ids(iota[2], iota[3])
        groups = ordered.reshape(_integers(iota[1]))
        return tuple(groups[0].tolist())
    mesh = re.search(
        r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}", line
    )
    if mesh is None:  # {}: all together
        return tuple(range(num_devices))
    axes, order, used = mesh.groups()
    sizes = {}
    for axis, size in re.findall(r"'([^']+)'=(\d+)", axes):
        sizes[axis] = int(size)
    written = re.fullmatch(_ORDER, order or "")
    devices = np.arange(num_devices)
    if written:
        devices = _device_ids(*written.groups())
    # An axis may be used in part: 'a':(2)4 is the 4 when a is taken as 2 x 4 x the rest.
    index = {axis: range(1) for axis in sizes}
    for axis, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", used):
        size = int(part or sizes[axis])
        stride = sizes[axis] // (int(before or 1) * size)
        index[axis] = range(0, stride * size, stride)
    ids = devices.reshape(tuple(sizes.values()))
    group = ids[np.ix_(*index.values())]
    return tuple(group.ravel().tolist())


_ORDER = r"(\[[\d,]+\])(?:T(\([\d,]+\)))?"  # [2,4]T(1,0)


def _device_ids(shape: str, transpose: str | None) -> np.ndarray:
    sizes = _integers(shape)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    if transpose:
        return ids.transpose(_integers(transpose))
    return ids


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))
