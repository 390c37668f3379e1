"""What a compiled step sends over the network, read from its HLO text."""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterable

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction.

    Attributes:
        kind: one of `KINDS`.
        group_size: devices that take part together.
        bytes: of the whole array, gathered or not yet scattered, each time it runs.
        times: how often it runs per call of the program.
        loop_unknown: it sits in a loop whose length the text does not say; `times` counts one turn.
    """

    kind: str
    group_size: int
    bytes: int
    times: int = 1
    loop_unknown: bool = False

    @property
    def bytes_sent(self) -> float:
        """Bytes that each device sends per call of the program, by the ring algorithms.

        An all-reduce is a reduce-scatter and an all-gather, each of which passes every piece but
        one on (Thakur, Rabenseifner and Gropp 2005, sections 4.1 and 4.4).
        """
        share = (self.group_size - 1) / self.group_size
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)
        return factor * self.bytes * self.times


def collectives(text: str) -> list[Collective]:
    """Returns the collectives of a compiled program, those between a device and itself left out.

    Those inside a loop count once per turn (`times`).

    Args:
        text: optimised HLO, from `CompiledStep.text()`; synchronous or with `-start` and `-done`.
    """
    num_devices = _num_devices(text)
    computations, entry = _computations(text)
    found = []

    def walk(name: str, times: int, unknown: bool) -> None:
        for line in computations[name]:
            if match := _INSTRUCTION.search(line):
                collective = _parse(line, *match.groups(), num_devices)
                if collective.group_size > 1:
                    found.append(dataclasses.replace(collective, times=times, loop_unknown=unknown))
                continue
            if " while(" not in line:
                for called in _called(line):
                    walk(called, times, unknown)
                continue
            trips = _TRIP_COUNT.search(line)
            for called in _called(line):
                turns = int(trips.group(1)) if trips else 1
                walk(called, times * turns, unknown or not trips)

    walk(entry, 1, False)
    return found


def summarize(found: Iterable[Collective]) -> dict[str, tuple[int, int, float]]:
    """Returns for each kind, per call: how many run, bytes of whole arrays, bytes sent."""
    totals = defaultdict(lambda: (0, 0, 0.0))
    for c in sorted(found, key=lambda c: KINDS.index(c.kind)):
        count, size, sent = totals[c.kind]
        totals[c.kind] = (count + c.times, size + c.bytes * c.times, sent + c.bytes_sent)
    return dict(totals)


_INSTRUCTION = re.compile(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+[0-9]+[a-z0-9]*|pred)\[([0-9,]*)\]")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|true_computation|false_computation|called_computations"
    r"|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Returns the lines of every computation by name, and the name of the entry."""
    computations, entry, current = {}, "", None
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            current = computations.setdefault(header.group(2), [])
            entry = header.group(2) if header.group(1) else entry
        elif current is not None:
            current.append(line)
    return computations, entry


def _called(line: str) -> list[str]:
    return [name.strip("%{} ") for group in _CALLED.findall(line) for name in group.split(",")]


def _num_devices(text: str) -> int:
    """Returns how many devices the program runs on, from the line that names the module."""
    header = text.partition("\n")[0]
    sizes = re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)
    return math.prod(map(int, sizes))


def _parse(line: str, result: str, kind: str, start: str | None, num_devices: int) -> Collective:
    sizes = [
        _bits(dtype) // 8 * math.prod(int(dim) for dim in dims.split(",") if dim)
        for dtype, dims in _ARRAY.findall(result)
    ]
    group = _group_size(line, kind, num_devices)
    total = sum(sizes)
    if kind == "reduce-scatter":
        total *= group  # the result is a device's piece
    elif kind == "all-gather" and start:
        total = total * group // (group + 1)  # operands are part of the result
    elif kind == "collective-permute" and start:
        total = sizes[0]  # so are they here, with two words of state
    return Collective(kind, group, total)


def _bits(dtype: str) -> int:
    """Returns the width of an HLO type: f32, bf16, u8, f8e4m3fn, pred."""
    return 8 if dtype == "pred" else int(re.search(r"\d+", dtype).group())


def _group_size(line: str, kind: str, num_devices: int) -> int:
    """Reads the size of the groups of devices, in any of the three ways that HLO writes them."""
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line).group(1)
        moves = [pair for pair in re.findall(r"(\d+),(\d+)", pairs) if pair[0] != pair[1]]
        return 2 if moves else 1
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return listed.group(1).count(",") + 1
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(iota.group(1))
    mesh = re.search(r"replica_groups=mesh\[(.*?)\][^{]*\{(.*?)\}", line)
    if mesh is None:
        return num_devices
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh.group(1)))
    # An axis may be used in part: 'axis_0':(2)4 is the 4 of axis_0 = 2 x 4 x ...
    used = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", mesh.group(2))
    return math.prod(int(part or sizes[axis]) for axis, part in used)
