"""Compiled programs as text (HLO): computations, the calls between them, sizes of arrays."""

import math
import re
from collections.abc import Mapping, Sequence

_ARRAY = re.compile(r"\b([a-z]+[0-9]+[a-z0-9]*|pred)\[([0-9,]*)\]")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|true_computation|false_computation|called_computations"
    r"|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)


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


def array_bytes(shape: str) -> list[int]:
    """Returns the bytes of each array of a shape: `f32[2,3]`, or a tuple's, `(pred[], bf16[8])`.

    The number in the name of a type is its bits: f32, bf16, u8, f8e4m3fn, s4.
    """
    sizes = []
    for dtype, dims in _ARRAY.findall(shape):
        bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
        sizes.append(bits * math.prod(int(size) for size in dims.split(",") if size) // 8)
    return sizes
