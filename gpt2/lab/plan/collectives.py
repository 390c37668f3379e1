"""Find the collectives of a compiled step in its HLO text, and the bytes that they send."""

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
    """A collective instruction in a compiled program."""

    kind: str
    group: tuple[int, ...]  # devices of the first group that communicates
    bytes: int  # size of the whole array: after a gather, or before a scatter
    times: int = 1  # number of times that it runs in one call of the program

    @property
    def bytes_sent(self) -> float:
        """Bytes that each device sends per call of the program, with ring algorithms.

        An all-reduce consists of a reduce-scatter and an all-gather. In each of these, the array is
        divided into one shard per device, and a device sends every shard except one (Thakur,
        Rabenseifner and Gropp 2005, sections 4.1 and 4.4).
        """
        sent = float(self.bytes * self.times)
        if self.kind == "collective-permute":
            return sent
        if self.kind == "all-reduce":
            sent *= 2
        return sent * (len(self.group) - 1) / len(self.group)


def collectives(text: str) -> list[Collective]:
    """Return the collectives between two or more devices in the HLO text of a program."""
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
            # A TPU's compiler may divide a collective into several fusions. Only the first fusion
            # is counted. It starts the collective, and its result is a tuple.
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
    """Map each kind of collective in `found`, such as `all-reduce`, to a description.

    `found` contains the collectives of one program. A description states, for one call of the
    program, the number of collectives of this kind, the bytes of their arrays, and the bytes that
    each device sends. If `found` is empty, return `{"collectives": "none"}`.
    """
    rows = {}
    for kind in KINDS:
        members = [each for each in found if each.kind == kind]
        if not members:
            continue
        number = sum(each.times for each in members)
        size = sum(each.bytes * each.times for each in members)
        sent = sum(each.bytes_sent for each in members)
        rows[kind] = (
            f"calls: {number}; arrays: {format_bytes(size)} in total; a device sends"
            f" {format_bytes(sent)}"
        )
    return rows or {"collectives": "none"}


_ARRAY = re.compile(r"\b([a-z]+[0-9]+[a-z0-9]*|pred)\[([0-9,]*)\]")
_INSTRUCTION = re.compile(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(")
_CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|true_computation|false_computation|called_computations"
    r"|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
# An attribute of the TPU fusions into which a collective is divided.
_CHAIN = "chain_id="
# Matches the result of the first fusion of a collective.
_BEGINS = re.compile(r"ROOT .* = \(.*\) custom-call\(")
# The prefix in the names of reduce-scatters on TPUs. These are fusions of an all-reduce and slices.
_TPU_REDUCE_SCATTER = "all-reduce-scatter"

Computations = dict[str, str]  # name of a computation -> its instructions, one per line
# Matches a computation: the word ENTRY if the program starts there, the name, and the instructions.
# The attributes of an instruction may have lines that begin with a closing brace.
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}$", re.M | re.S)
# Matches the comparison that ends a loop's condition: is the index less than the limit?
_LIMIT = re.compile(r"ROOT .* compare\(%?[\w.\-]+, %?([\w.\-]+)\), direction=LT")


def _iterations(line: str, computations: Computations) -> int:
    """Return the number of iterations of a `while` instruction. If it is unknown, return 1.

    `line` is the instruction, and `computations` contains all computations of its program. Programs
    for TPUs do not state the number. In these programs, the loop's condition compares an index,
    which `lax.scan` counts from 0, with a constant. The constant is the number of iterations. Warn
    if the number is unknown.
    """
    count = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    if count is None and condition:
        body = computations.get(condition[1], "")
        limit = _LIMIT.search(body)
        if limit:
            count = re.search(rf"{re.escape(limit[1])} = .* constant\((\d+)\)", body)
    if count is None:
        warn(
            "The length of a loop is unknown, so its collectives are counted only once. The"
            " printed network traffic and time may be too small"
        )
        return 1
    return int(count[1])


def _whole_bytes(result: str, kind: str, is_start: bool, group_size: int) -> int:
    """Return the size in bytes of a collective's whole array, after a gather or before a scatter.

    `result` is the result of the instruction: an array, such as `f32[2,3]`, or a tuple of arrays,
    such as `(pred[], bf16[8])`. `kind` is one of `KINDS`. `is_start` means that the instruction
    only starts the collective, which then runs asynchronously. `group_size` is the number of
    devices that communicate with each other.
    """
    sizes = []
    for dtype, dims in _ARRAY.findall(result):
        # The first number in f32, bf16, u8, f8e4m3fn or s4 is the number of bits.
        bits = 8 if dtype == "pred" else _integers(dtype)[0]
        sizes.append(bits * math.prod(_integers(dims)) // 8)
    size = sum(sizes)
    if not is_start:
        # The result of a reduce-scatter is one device's part.
        return size * group_size if kind == "reduce-scatter" else size
    # The start of an asynchronous all-gather, reduce-scatter or all-to-all also returns its
    # operands. The start of a permutation returns its operands and two words of state.
    if kind in ("all-gather", "reduce-scatter"):
        return size * group_size // (group_size + 1)
    if kind == "all-to-all":
        return size // 2
    if kind == "collective-permute":
        return sizes[0]
    return size


def _first_group(line: str) -> tuple[int, ...]:
    """Return the indices of the devices in the first group that a collective connects.

    `line` is the HLO instruction of the collective. HLO has three notations for groups. Raise a
    ValueError if `line` contains none of them.
    """
    # {{0,1},{2,3}} lists groups, or pairs of sender and receiver.
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", line)
    if listed:
        return _integers(listed[1])
    # In [4,2]<=[2,4]T(1,0), [4,2] means four groups of two devices. The rest is the order in which
    # the devices fill the groups.
    iota = re.search(rf"replica_groups=\[([\d,]+)\]<={_ORDER}", line)
    if iota:
        size, *order = iota.groups()
        groups = _ordered_devices(*order).reshape(_integers(size))
        return tuple(groups[0].tolist())
    # In mesh['a'=2,'b'=4] {'b'}, the brackets contain the mesh's axes with their sizes, and the
    # braces contain the axes along which the devices of a group vary.
    mesh = re.search(
        rf"replica_groups=mesh\[(.*?)\](?:, device_ids=\({_ORDER}\))? \{{(.*?)\}}", line
    )
    if mesh is None:
        raise ValueError(
            "gpt2/lab/plan/collectives.py cannot read the groups of devices in this HLO"
            f" instruction: {line}"
        )
    axes, shape, transpose, used = mesh.groups()
    sizes = list[int]()
    index = list[int | slice]()
    for axis, size in re.findall(r"'(\w+)'=(\d+)", axes):
        sizes.append(int(size))
        index.append(slice(None) if f"'{axis}'" in used else 0)
    devices = _ordered_devices(shape or str(math.prod(sizes)), transpose)
    group = devices.reshape(sizes)[tuple(index)]
    return tuple(group.ravel().tolist())


_ORDER = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"  # matches [2,4]T(1,0)


def _ordered_devices(shape: str, transpose: str | None) -> np.ndarray:
    sizes = _integers(shape)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose(_integers(transpose)) if transpose else ids


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))
