"""ledger.jsonl: the ideas of a ledger, and the answers to them. A line is an idea at one time.

An idea is an arm that is tried against the best of its time. Idea 0 is the start. The newest line
of an idea counts, and the order of lines is the order of events.
"""

import json
import math
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gpt2.lab.experiments.arms import Arm
from gpt2.lab.ledger.evidence import Array, half_width, level_at
from gpt2.utils.files import reading

_INTERVAL_LEVEL = 0.05  # how often an interval misses the true difference


@dataclass
class Idea:
    """An arm that is tried against the best of its time."""

    number: int
    text: str  # the value of `--idea`, and for the working tree the files that differ
    best: int  # the number of the idea that it is tried against
    arm: Arm
    code: str  # the hash of its code
    # The final losses of the best and of the idea, for each seed.
    pairs: list[tuple[float, float]] = field(default_factory=list)
    answer: str = ""  # keep, discard, undecided or failed; "" until there is one
    why: str = ""
    level: float = 0.0  # at which it was judged
    seconds: float = 0.0  # of all commands that tried it

    @property
    def differences(self) -> Array:
        """Idea - best, `[pairs]`."""
        scores = np.array(self.pairs).reshape(-1, 2)
        return scores[:, 1] - scores[:, 0]

    @property
    def interval(self) -> Array:
        """The mean difference and the ends of an interval that holds after every pair, `[3]`."""
        if not self.pairs:
            return np.full(3, math.nan)
        differences = self.differences
        error = half_width(differences, _INTERVAL_LEVEL)
        return differences.mean() + np.array([0.0, -error, error])

    def same(self, other: "Idea") -> bool:
        """Return whether both would train the same."""
        return self.code == other.code and self.arm.options == other.arm.options


@dataclass
class Ledger:
    """The content of a ledger.jsonl."""

    ideas: list[Idea] = field(default_factory=list)  # by number
    # Numbers of the ideas that have trained a pair or diverged, in that order.
    tests: dict[int, None] = field(default_factory=dict)

    @property
    def kept(self) -> list[Idea]:
        """The kept ideas, oldest first. Each was tried against the one before it."""
        return [idea for idea in self.ideas if idea.answer == "keep"]

    @property
    def best(self) -> Idea:
        """The best idea so far."""
        return [self.ideas[0], *self.kept][-1]

    def level(self, number: int) -> float:
        """Return the level at which an idea is judged now."""
        position = [*self.tests, number].index(number) + 1
        return level_at(position, len(self.kept))

    def noise(self) -> float:
        """Return the standard deviation of a difference, from all ideas; NaN without pairs."""
        samples = [idea.differences for idea in self.ideas if len(idea.pairs) > 1]
        if not samples:
            return math.nan
        rest = np.concatenate([sample - sample.mean() for sample in samples])
        return math.sqrt(rest @ rest / (len(rest) - len(samples)))


def read_ledger(root: Path) -> Ledger:
    """Read the ledger of a folder. A new one has no ideas."""
    ledger = Ledger()
    path = root / "ledger.jsonl"
    text = path.read_bytes() if path.exists() else b""
    ideas = dict[int, Idea]()  # the newest by number
    checksum = 0
    for number, line in enumerate(_whole_lines(text), 1):
        with reading(f"{path}:{number}", "Restore it from a copy"):
            tree = json.loads(line)
            expected = tree.pop("crc32")
            checksum = _checksum(tree, checksum)
            if checksum != expected:
                raise ValueError("it was altered, or a line before it is missing")
            idea = Idea(**tree | {"arm": Arm.from_options(**tree["arm"])})
            ideas[idea.number] = idea
            if idea.pairs or idea.answer == "discard":
                ledger.tests.setdefault(idea.number)
    ledger.ideas = list(ideas.values())
    return ledger


def append(root: Path, idea: Idea) -> None:
    """Add a line, whole or not at all. The caller holds the lock of the ledger."""
    with open(root / "ledger.jsonl", "ab+") as file:
        file.seek(0)
        lines = _whole_lines(file.read())
        # A kill may have cut the last line. Without its end it means nothing.
        file.truncate(sum(map(len, lines)))
        before = json.loads(lines[-1])["crc32"] if lines else 0
        tree = vars(idea) | {"arm": idea.arm.to_tree()}
        line = tree | {"crc32": _checksum(tree, before)}
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _checksum(tree: dict, before: int) -> int:
    """Return the checksum of a line, which depends on the checksum of the line `before` it."""
    return zlib.crc32(json.dumps(tree).encode(), before)


def _whole_lines(text: bytes) -> list[bytes]:
    """Return the lines that end with a line break."""
    return text[: text.rfind(b"\n") + 1].splitlines(keepends=True)
