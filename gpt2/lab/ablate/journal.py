"""ledger.jsonl: what was tried against what, and what came of it: a line is an idea as it stood.

An idea is an arm that is tried against the best of its time; the first, number 0, is the start. Its
newest line counts, and the order of lines tells which ideas were kept before.
"""

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gpt2.lab.ablate.arms import Arm
from gpt2.lab.ablate.evidence import half_width, level_at
from gpt2.lab.ablate.power import LEVEL, Array
from gpt2.utils.files import reading


@dataclass
class Idea:
    """An arm that is tried against the best of its time."""

    number: int
    text: str  # as `--idea` gave it; of the working tree also what differs
    best: int  # the number of what it is tried against
    arm: Arm
    code: str  # the hash of its code
    # The scores of the best and of the idea, of each seed.
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
        """The mean difference, and an interval which holds whenever one looks, `[3]`."""
        if not self.pairs:
            return np.full(3, math.nan)
        differences = self.differences
        error = half_width(differences, LEVEL)
        return differences.mean() + np.array([0.0, -error, error])

    def same(self, other: "Idea") -> bool:
        """Returns whether both would train alike."""
        return self.code == other.code and self.arm.options == other.arm.options


@dataclass
class Ledger:
    """What the lines of a ledger.jsonl say."""

    ideas: list[Idea] = field(default_factory=list)  # by number
    # Numbers of ideas that were seen to train or to diverge, in that order.
    tests: dict[int, None] = field(default_factory=dict)

    @property
    def kept(self) -> list[Idea]:
        """The ideas that were kept, oldest first: each was tried against the one before."""
        return [idea for idea in self.ideas if idea.answer == "keep"]

    @property
    def best(self) -> Idea:
        """The best so far."""
        return [self.ideas[0], *self.kept][-1]

    def level(self, number: int) -> float:
        """Returns the level of an idea now; it takes its place among the tests when it is one."""
        place = [*self.tests, number].index(number) + 1
        return level_at(place, len(self.kept))

    def noise(self) -> float:
        """Returns the deviation of a difference, of all ideas together; nan without any."""
        spread = [idea.differences for idea in self.ideas if len(idea.pairs) > 1]
        if not spread:
            return math.nan
        rest = np.concatenate([each - each.mean() for each in spread])
        return math.sqrt(rest @ rest / (len(rest) - len(spread)))


def read_ledger(root: Path) -> Ledger:
    """Reads the ledger of a directory, which has no ideas if it has not begun."""
    ledger = Ledger()
    path = root / "ledger.jsonl"
    text = path.read_bytes() if path.exists() else b""
    newest = dict[int, dict]()  # by number
    for place, line in enumerate(_whole(text).splitlines(), 1):
        with reading(f"{path}:{place}", "Restore it from a copy"):
            tree = json.loads(line)
            number = tree["number"]
            if number > len(newest):
                raise ValueError("lines before it are lost")
            newest[number] = tree
            if tree["pairs"] or tree["answer"] == "discard":
                ledger.tests.setdefault(number)
    for tree in newest.values():
        arm = Arm.from_options(**tree["arm"])
        ledger.ideas.append(Idea(**tree | {"arm": arm}))
    return ledger


def append(root: Path, idea: Idea) -> None:
    """Adds a line, whole or not at all. Who calls holds the lock of the ledger."""
    tree = vars(idea) | {"arm": idea.arm.to_tree()}
    with open(root / "ledger.jsonl", "ab+") as file:
        file.seek(0)
        # A line that a kill has cut says nothing.
        file.truncate(len(_whole(file.read())))
        file.write(json.dumps(tree).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _whole(text: bytes) -> bytes:
    """Returns the lines that are whole."""
    return text[: text.rfind(b"\n") + 1]
