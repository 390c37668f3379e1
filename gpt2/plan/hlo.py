"""Compiled programs as text (HLO): computations, the calls between them, sizes of arrays."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_ARRAY = re.compile(r"\b([a-z]+[0-9]+[a-z0-9]*|pred)\[([0-9,]*)\]")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|true_computation|false_computation|called_computations"
    r"|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)


class Instruction(NamedTuple):
    """One line of HLO text: `name = shape opcode(operands)`; names are unique in a program."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    line: str


def parse_instruction(line: str) -> Instruction | None:
    """Returns the instruction that a line of HLO text holds, or None."""
    match = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\(([^)]*)", line)
    if match is None:
        return None
    operands = re.findall(r"%([\w.\-]+)", match[4])
    return Instruction(match[1], match[2], match[3], tuple(operands), line)


def split_computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Returns the lines of every computation by name, and the name of the entry."""
    computations: dict[str, list[str]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            current = computations.setdefault(header.group(2), [])
            entry = header.group(2) if header.group(1) else entry
        elif current is not None:
            current.append(line)
    return computations, entry


def called_by(line: str) -> list[str]:
    """Returns the names of the computations that an instruction calls."""
    return [name.strip("%{} ") for group in _CALLED.findall(line) for name in group.split(",")]


def turns_of(line: str, computations: Mapping[str, Sequence[str]]) -> int | None:
    """Returns how often the loop of a `while` instruction runs, or None.

    Programs for TPUs do not say it. There the condition compares the number of the turn, which
    `lax.scan` counts from 0, to a constant.
    """
    if trips := _TRIP_COUNT.search(line):
        return int(trips[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    lines = computations.get(condition[1], []) if condition else []
    root = next((line for line in lines if line.lstrip().startswith("ROOT")), "")
    limit = re.search(r" compare\(%?[\w.\-]+, %?([\w.\-]+)\), direction=LT", root)
    values = (
        re.search(rf"%?{re.escape(limit[1])} = .* constant\((\d+)\)", x) for x in lines if limit
    )
    return next((int(value[1]) for value in values if value), None)


def arrays_in(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Returns dtype and dimensions of each array of a shape, which may be a tuple's."""
    return [
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(shape)
    ]


def bytes_of(dtype: str, dims: Sequence[int]) -> int:
    """Returns the bytes of an array of an HLO type: f32, bf16, u8, f8e4m3fn, s4, pred."""
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return bits * math.prod(dims) // 8
