"""Read from the text (HLO) of a compiled step what it sends over the network."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gpt2.errors import warn
from gpt2.utils.text import format_bytes

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)


class Collective(NamedTuple):
    """A collective instruction of a program."""

    kind: str
    group: tuple[int, ...]  # devices of the first group that communicates
    bytes: int  # of the whole array: after a gather, before a scatter
    times: int = 1  # it runs in a call of the program

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
    """Return the collectives of a program in HLO that run between two devices or more."""
    computations: Computations = {}
    entry = ""
    for is_entry, name, body in _COMPUTATION.findall(text):
        computations[name] = body
        if is_entry:
            entry = name
    found = list[Collective]()

    def walk(name: str, times: int) -> None:
        body = computations[name]
        for line in body.splitlines():
            # A TPU's compiler may divide a collective into several fusions. Only the first one
            # counts, which returns a tuple of the results that it has begun.
            if _CHAIN in line and not _BEGINS.search(body):
                continue
            match = _INSTRUCTION.search(line)
            if match:
                result, kind, start = match.groups()
                group = _first_group(line)
                size = _whole_bytes(result, kind, bool(start), len(group))
                if name.startswith(_TPU_REDUCE_SCATTER) and kind == "all-reduce":
                    kind = "reduce-scatter"
                if len(group) > 1:
                    found.append(Collective(kind, group, size, times))
                continue
            iterations = 1
            if " while(" in line:
                iterations = _iterations(line, computations)
            names = ",".join(_CALLED.findall(line))
            for called in re.findall(r"[\w.\-]+", names):
                if called in computations:
                    walk(called, times * iterations)

    walk(entry, 1)
    return found


def describe_collectives(found: Sequence[Collective]) -> dict[str, str]:
    """Return a row of text for each kind of collective: number, bytes in all, bytes sent."""
    rows = {}
    for kind in KINDS:
        members = [each for each in found if each.kind == kind]
        if not members:
            continue
        number = sum(each.times for each in members)
        size = sum(each.bytes * each.times for each in members)
        sent = sum(each.bytes_sent for each in members)
        rows[kind] = (
            f"{number} of {format_bytes(size)} in all, {format_bytes(sent)} sent"
        )
    return rows or {"collectives": "none"}


_ARRAY = re.compile(r"\b([a-z]+[0-9]+[a-z0-9]*|pred)\[([0-9,]*)\]")
_INSTRUCTION = re.compile(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(")
_CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|true_computation|false_computation|called_computations"
    r"|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
# Marks the fusions of a TPU that belong to one collective.
_CHAIN = "chain_id="
# The result of the first of them.
_BEGINS = re.compile(r"ROOT .* = \(.*\) custom-call\(")
# A reduce-scatter of a TPU is a fusion that holds an all-reduce, and slices.
_TPU_REDUCE_SCATTER = "all-reduce-scatter"

Computations = dict[str, str]  # the instructions, a line each, by a computation's name
# The word ENTRY if it calls the others, its name, and its instructions, whose attributes may have
# lines that begin with a bracket.
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}$", re.M | re.S)
# The result of a loop's condition.
_LIMIT = re.compile(r"ROOT .* compare\(%?[\w.\-]+, %?([\w.\-]+)\), direction=LT")


def _iterations(line: str, computations: Computations) -> int:
    """Return how often the loop of a `while` instruction runs, or 1 with a warning.

    Programs for TPUs do not state it. Their condition compares the number of the iteration, which
    `lax.scan` counts from 0, to a constant.
    """
    count = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    if count is None and condition:
        body = computations.get(condition[1], "")
        limit = _LIMIT.search(body)
        if limit:
            count = re.search(rf"{re.escape(limit[1])} = .* constant\((\d+)\)", body)
    if count is None:
        warn("The length of a loop is unknown. Its collectives are counted once")
        return 1
    return int(count[1])


def _whole_bytes(result: str, kind: str, is_start: bool, group_size: int) -> int:
    """Return the bytes of the whole array, from the shape of an instruction's result.

    The shape is that of an array, `f32[2,3]`, or of a tuple of arrays, `(pred[], bf16[8])`.
    """
    sizes = []
    for dtype, dims in _ARRAY.findall(result):
        # The first number in f32, bf16, u8, f8e4m3fn or s4 counts its bits.
        bits = 8 if dtype == "pred" else _integers(dtype)[0]
        sizes.append(bits * math.prod(_integers(dims)) // 8)
    size = sum(sizes)
    if not is_start:
        # The result of a reduce-scatter is one device's part.
        return size * group_size if kind == "reduce-scatter" else size
    # The start of an asynchronous collective returns its operands as well, and the start of a
    # permutation two words of state.
    if kind in ("all-gather", "reduce-scatter"):
        return size * group_size // (group_size + 1)
    if kind == "all-to-all":
        return size // 2
    if kind == "collective-permute":
        return sizes[0]
    return size


def _first_group(line: str) -> tuple[int, ...]:
    """Return the first group of devices, which HLO writes in one of three ways."""
    # {{0,1},{2,3}}: groups, or pairs of sender and receiver.
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", line)
    if listed:
        return _integers(listed[1])
    # [4,2]<=[2,4]T(1,0): the shape of all groups, and the order of the devices in them.
    iota = re.search(rf"replica_groups=\[([\d,]+)\]<={_ORDER}", line)
    if iota:
        size, *order = iota.groups()
        groups = _ordered_devices(*order).reshape(_integers(size))
        return tuple(groups[0].tolist())
    # mesh['a'=2,'b'=4] {'b'}: the mesh, and the axes along which a group lies.
    mesh = re.search(
        rf"replica_groups=mesh\[(.*?)\](?:, device_ids=\({_ORDER}\))? \{{(.*?)\}}", line
    )
    if mesh is None:
        raise ValueError(f"This instruction names no devices: {line}")
    axes, shape, transpose, used = mesh.groups()
    sizes = list[int]()
    index = list[int | slice]()
    for axis, size in re.findall(r"'(\w+)'=(\d+)", axes):
        sizes.append(int(size))
        index.append(slice(None) if f"'{axis}'" in used else 0)
    devices = _ordered_devices(shape or str(math.prod(sizes)), transpose)
    group = devices.reshape(sizes)[tuple(index)]
    return tuple(group.ravel().tolist())


_ORDER = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"  # [2,4]T(1,0)


def _ordered_devices(shape: str, transpose: str | None) -> np.ndarray:
    sizes = _integers(shape)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose(_integers(transpose)) if transpose else ids


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))
