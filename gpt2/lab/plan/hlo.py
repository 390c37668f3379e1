"""The text of a compiled program, HLO: computations, which are instructions, a line each."""

import re

_CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|true_computation|false_computation|called_computations"
    r"|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


class Hlo:
    """A program, by its computations' lines; `entry` is the name of the first."""

    def __init__(self, text: str):
        self.computations: dict[str, list[str]] = {"": []}
        self.entry = ""
        name = ""
        for line in text.splitlines():
            header = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
            if header:
                name = header[2]
                self.computations[name] = []
                if header[1]:
                    self.entry = name
            else:
                self.computations[name].append(line)

    def called_by(self, line: str) -> list[str]:
        """Returns the names of the computations that an instruction calls."""
        groups = ",".join(_CALLED.findall(line))
        names = re.findall(r"[\w.\-]+", groups)
        return [name for name in names if name in self.computations]

    def inside(self, line: str) -> list[str]:
        """Returns the lines of the computations that an instruction calls."""
        inside = list[str]()
        for name in self.called_by(line):
            inside += self.computations[name]
        return inside

    def turns(self, line: str) -> int | None:
        """Returns how often the loop of a `while` instruction runs, or None.

        Programs for TPUs do not say it. There the condition compares the number of the turn, which
        `lax.scan` counts from 0, to a constant.
        """
        turns = _TRIP_COUNT.search(line)
        condition = re.search(r"condition=%?([\w.\-]+)", line)
        if turns is None and condition:
            lines = self.computations.get(condition[1], [])
            compare = r" compare\(%?[\w.\-]+, %?([\w.\-]+)\), direction=LT"
            limit = re.search(compare, root(lines))
            if limit:
                constant = rf"%?{re.escape(limit[1])} = .* constant\((\d+)\)"
                turns = re.search(constant, "\n".join(lines))
        return int(turns[1]) if turns else None


def root(lines: list[str]) -> str:
    """Returns the line of a computation that gives its result."""
    for line in lines:
        if line.lstrip().startswith("ROOT"):
            return line
    return ""
