"""What a compiled step sends over the network, read from its HLO text."""

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

from gpt2.plan.hlo import array_bytes, called_by, split_computations, turns_of
from gpt2.utils.text import format_bytes

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction.

    Attributes:
        kind: one of `KINDS`.
        group: the devices that take part together, of the first group if there are several.
        bytes: of the whole array, gathered or not yet scattered, each time it runs.
        times: how often it runs per call of the program.
        loop_unknown: it runs in a loop of unknown length; `times` counts one turn of that loop.
        asynchronous: it has a start and an end, between which other instructions may run.
        overlapped: a matrix product runs between them. All of its bytes count as overlapped then,
            however short the product is.
    """

    kind: str
    group: tuple[int, ...]
    bytes: int
    times: int = 1
    loop_unknown: bool = False
    asynchronous: bool = False
    overlapped: bool = False

    @property
    def bytes_sent(self) -> float:
        """Bytes that each device sends per call of the program, by the ring algorithms.

        An all-reduce is a reduce-scatter and an all-gather, each of which passes every piece but
        one on (Thakur, Rabenseifner and Gropp 2005, sections 4.1 and 4.4).
        """
        share = (len(self.group) - 1) / len(self.group)
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)
        return factor * self.bytes * self.times


def collectives(text: str) -> list[Collective]:
    """Returns the collectives of a program as HLO, without those of a device with itself."""
    num_devices = _num_devices(text)
    computations, entry = split_computations(text)
    found = []

    def walk(name: str, times: int, unknown: bool, after: list[str]) -> None:
        lines = computations[name]
        for i, line in enumerate(lines):
            if _CHAIN in line and not _starts_chain(lines):
                continue  # a part of a collective that has been counted
            if match := _INSTRUCTION.search(line):
                collective = _parse(line, *match.groups(), num_devices=num_devices)
                if name.startswith(_TPU_REDUCE_SCATTER) and collective.kind == "all-reduce":
                    collective = dataclasses.replace(collective, kind="reduce-scatter")
                if len(collective.group) > 1:
                    during = _until_done(line, lines[i + 1 :], after, computations)
                    found.append(
                        dataclasses.replace(
                            collective,
                            times=times,
                            loop_unknown=unknown,
                            asynchronous=match[3] is not None or _CHAIN in line,
                            overlapped=any(_has_product(x, computations) for x in during),
                        )
                    )
                continue
            if " while(" not in line:
                for called in called_by(line):
                    walk(called, times, unknown, lines[i + 1 :])
                continue
            turns = turns_of(line, computations)
            for called in called_by(line):
                walk(called, times * (turns or 1), unknown or turns is None, [])

    walk(entry, 1, False, [])
    return found


def describe_collectives(found: Sequence[Collective]) -> dict[str, str]:
    """Returns a row per kind of collective: how many, and how much is sent.

    Where some have a start and an end, the share is told of those during which a product runs.
    """
    rows, asynchronous = {}, any(c.asynchronous for c in found)
    for kind in [kind for kind in KINDS if any(c.kind == kind for c in found)]:
        members = [c for c in found if c.kind == kind]
        sent = sum(c.bytes_sent for c in members)
        overlapped = sum(c.bytes_sent for c in members if c.overlapped)
        rows[kind] = (
            f"{sum(c.times for c in members)} of "
            f"{format_bytes(sum(c.bytes * c.times for c in members))} in all, "
            f"{format_bytes(sent)} sent by each device"
        ) + (f", {overlapped / sent:.0%} while products run" if asynchronous else "")
    if any(c.loop_unknown for c in found):
        rows["loops"] = "some have no known length: what they send is counted once"
    return rows or {"collectives": "none"}


_INSTRUCTION = re.compile(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(")
_CHAIN = "chain_id="  # in what a TPU's compiler writes of a collective in several fusions
# A reduce-scatter of a TPU is a fusion that holds an all-reduce, and slices.
_TPU_REDUCE_SCATTER = "all-reduce-scatter"


def _until_done(
    line: str, rest: list[str], after: list[str], computations: dict[str, list[str]]
) -> list[str]:
    """Returns the lines that run while a collective does; none if it is not asynchronous.

    `rest` follows its line in its computation, and `after` the call of that computation.
    """
    if chain := re.search(rf'{_CHAIN}"\d+"', line):  # of a TPU: other fusions continue it
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
    done = next((i for i, other in enumerate(rest) if end.search(other)), 0)
    return rest[:done]


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
    """Returns whether a fusion of a TPU starts a collective that other fusions continue.

    All of them hold the instruction. The first one returns a tuple of what it has begun.
    """
    root = next((line for line in lines if line.lstrip().startswith("ROOT")), "")
    return re.search(r"= \(.*\) custom-call\(", root) is not None


def _num_devices(text: str) -> int:
    """Returns how many devices the program runs on, from the line that names the module."""
    header = text.partition("\n")[0]
    sizes = re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)
    return math.prod(map(int, sizes))


def _parse(line: str, result: str, kind: str, start: str | None, *, num_devices: int) -> Collective:
    sizes = array_bytes(result)
    group = _first_group(line, kind, num_devices)
    total = sum(sizes)
    if kind == "reduce-scatter" and not start:
        total *= len(group)  # the result is a device's piece
    elif kind in ("all-gather", "reduce-scatter") and start:
        total = total * len(group) // (len(group) + 1)  # operands are part of the result
    elif kind == "all-to-all" and start:
        total //= 2  # here too
    elif kind == "collective-permute" and start:
        total = sizes[0]  # operands are part of this result too, with two words of state
    return Collective(kind, group, total)


def _first_group(line: str, kind: str, num_devices: int) -> tuple[int, ...]:
    """Returns the first group of devices, which HLO writes in one of four ways."""
    if kind == "collective-permute":  # {{0,1},{1,0}}: who sends to whom
        pairs = re.findall(r"\{(\d+),(\d+)\}", line.partition("source_target_pairs=")[2])
        return next(((int(a), int(b)) for a, b in pairs if a != b), (0,))
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return _integers(listed[1])
    if iota := re.search(rf"replica_groups=(\[[\d,]+\]){_IOTA}", line):
        return tuple(_device_ids(*iota.groups()[1:]).reshape(_integers(iota[1]))[0].tolist())
    mesh = re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}", line)
    if mesh is None:  # {}: all together
        return tuple(range(num_devices))
    axes, order, used = mesh.groups()
    sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    shape = tuple(sizes.values())
    devices = np.arange(num_devices)
    if order:
        written = re.fullmatch(_ORDER, order)
        assert written is not None, order
        devices = _device_ids(*written.groups())
    # An axis may be used in part: 'a':(2)4 is the 4 when a is taken as 2 x 4 x the rest.
    parts = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", used)
    index, ids = [[0]] * len(shape), devices.reshape(shape)
    for axis, before, size in parts:
        number = list(sizes).index(axis)
        stride = sizes[axis] // (int(before) * int(size)) if before else 1
        chosen = range(0, stride * int(size or sizes[axis]), stride)
        index[number] = list(chosen)
    return tuple(ids[np.ix_(*index)].ravel().tolist())


_IOTA = r"<=(\[[\d,]+\])(?:T(\([\d,]+\)))?"  # [4,2]<=[2,4]T(1,0)
_ORDER = r"(\[[\d,]+\])(?:T(\([\d,]+\)))?"


def _device_ids(shape: str, transpose: str | None) -> np.ndarray:
    ids = np.arange(math.prod(_integers(shape))).reshape(_integers(shape))
    return ids.transpose(_integers(transpose)) if transpose else ids


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))
