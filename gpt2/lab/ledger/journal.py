"""ledger.jsonl: the ideas of a ledger, and the answers to them.

An idea is compared with the version that was the best when the idea was added to the ledger. Idea 0
is the version with which the ledger started.

Each line is the state of an idea at some time. The newest line of an idea is valid, and the order
of lines is the order of events.
"""

import json
import math
import os
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gpt2.errors import UserError
from gpt2.lab.experiments.arms import Arm
from gpt2.lab.experiments.decisions import Answer
from gpt2.lab.ledger.evidence import Array, half_width, level_at
from gpt2.utils.files import reading

# Matches `FOLDER COMMIT`. Other characters are refused, because the folder becomes part of a path,
# and the commit becomes an argument of git.
_NAMES = re.compile(r"\d{3,}-[\w.,=+-]+ ([0-9a-f]{40,64})?")
_INTERVAL_LEVEL = 0.05  # probability that an interval misses the true difference


@dataclass(kw_only=True)
class Sample:
    """The pairs of an idea at one size.

    A pair is a run of the best version and a run of the idea with the same seed.
    """

    # Each seed is drawn at random when its pair begins. The last seed's pair may not have ended.
    seeds: list[int] = field(default_factory=list)
    # For each seed, the losses of the best version and of the idea, measured by the referee.
    pairs: list[tuple[float, float]] = field(default_factory=list)
    # For each seed, the durations of the best version's run and of the idea's run, in seconds.
    times: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for values in (self.pairs, self.times):
            if len(np.array(values, float).reshape(-1, 2)) != len(values):
                raise ValueError("a pair does not consist of two numbers")

    @property
    def differences(self) -> Array:
        """The final loss of the idea minus the best version's, for each pair: `[pairs]`."""
        scores = np.array(self.pairs).reshape(-1, 2)
        return scores[:, 1] - scores[:, 0]


@dataclass
class Idea(Sample):
    """An arm of a ledger, compared with the version that was the best when the arm was added.

    The inherited fields contain the pairs at the ledger's own size. The evidence is computed only
    from these pairs, and not from the pairs at smaller sizes in `screens`.
    """

    number: int
    text: str  # the value of `--idea`; for the working tree, also the files that differ
    best: int  # the number of the best version, with which this idea is compared
    arm: Arm
    code: str  # the hash of the arm's code
    # Depth -> the pairs at that small size, the smallest first. Idea 0 has no pairs.
    screens: dict[int, Sample] = field(default_factory=dict)
    answer: Answer = Answer.OPEN
    why: str = ""  # the reason for the answer
    level: float = 0.0  # the level at which the answer was found
    seconds: float = 0.0  # the duration of all commands that compared this idea

    @property
    def slowdown(self) -> float:
        """The time of the idea's runs, divided by the time of the best version's runs."""
        best_seconds, seconds = np.array(self.times).sum(0)
        return float(seconds / best_seconds)

    @property
    def screen_means(self) -> dict[int, float]:
        """The mean difference (idea - best) at each small size that has pairs, by depth."""
        means = dict[int, float]()
        for depth, sample in self.screens.items():
            if sample.pairs:
                means[depth] = sample.differences.mean()
        return means

    def sample(self, depth: int) -> Sample:
        """Return the pairs at a small size or, with a depth of 0, at the ledger's size."""
        return self.screens[depth] if depth else self

    def continues(self, earlier: "Idea") -> bool:
        """Return whether this can be a later state of the idea whose earlier state is `earlier`.

        The seeds of this state must begin with the seeds of `earlier`.
        """
        if self.screens.keys() != earlier.screens.keys():
            return False
        samples = zip(self.samples(), earlier.samples(), strict=True)
        return all(now.seeds[: len(old.seeds)] == old.seeds for now, old in samples)

    def samples(self) -> list[Sample]:
        """Return the pairs at each small size, and then at the ledger's size."""
        return [*self.screens.values(), self]

    @property
    def interval(self) -> Array:
        """The mean difference, and the two ends of its 95 % interval.

        The interval is valid although it is computed after every pair; see `half_width`.
        """
        if not self.pairs:
            return np.full(3, math.nan)
        differences = self.differences
        error = half_width(differences, _INTERVAL_LEVEL)
        return differences.mean() + np.array([0.0, -error, error])

    def same(self, other: "Idea") -> bool:
        """Return whether both ideas have the same code and the same options."""
        return self.code == other.code and self.arm.options == other.arm.options


@dataclass
class Ledger:
    """The content of ledger.jsonl: all ideas, and the order in which they were first tested."""

    ideas: list[Idea] = field(default_factory=list)  # ordered by number
    # Numbers of the ideas that have drawn a seed for the ledger's own size, not only for a screen,
    # in the order in which they drew their first seeds.
    tests: dict[int, None] = field(default_factory=dict)

    @property
    def kept(self) -> list[Idea]:
        """The kept ideas, oldest first.

        The first was compared with idea 0, and each later one with the kept idea before it.
        """
        return [idea for idea in self.ideas if idea.answer == Answer.KEEP]

    @property
    def best(self) -> Idea:
        """The last idea that was kept, or idea 0 if none was kept."""
        return [self.ideas[0], *self.kept][-1]

    def newest(self, idea: Idea) -> Idea:
        """Return the current state of an idea, given its earlier state `idea`.

        Raise a UserError if the ledger no longer contains this idea.
        """
        if idea.number < len(self.ideas):
            newest = self.ideas[idea.number]
            if newest.same(idea) and newest.continues(idea):
                return newest
        raise UserError(
            f"The ledger no longer contains the idea {idea.arm.name}, because ledger.jsonl was"
            " removed or replaced",
            "Restore the file, and repeat the command",
        )

    def level(self, number: int) -> float:
        """Return the current level (allowed error rate) of an idea, given its number."""
        position = [*self.tests, number].index(number) + 1
        return level_at(position, len(self.kept))

    def noise(self) -> float:
        """Return the standard deviation of a pair's difference, pooled over all ideas.

        Return NaN if no idea has two pairs.
        """
        samples = [idea.differences for idea in self.ideas if len(idea.pairs) > 1]
        if not samples:
            return math.nan
        rest = np.concatenate([sample - sample.mean() for sample in samples])
        return math.sqrt(rest @ rest / (len(rest) - len(samples)))


def read_ledger(root: Path) -> Ledger:
    """Read the ledger in a folder. If there is none, return a ledger without ideas.

    Raise a UserError if a line of ledger.jsonl was altered, or if a line before it is missing.
    """
    ledger = Ledger()
    path = root / "ledger.jsonl"
    text = path.read_bytes() if path.exists() else b""
    ideas = dict[int, Idea]()  # number -> the newest state of the idea
    checksum = 0
    for number, line in enumerate(_whole_lines(text), 1):
        with reading(f"{path}:{number}", "Restore the file from a copy"):
            tree = json.loads(line)
            expected = tree.pop("crc32")
            checksum = _checksum(tree, checksum)
            if checksum != expected:
                raise ValueError("the line was altered, or an earlier line is missing")
            tree["answer"] = Answer(tree["answer"])
            tree["arm"] = Arm.from_options(**tree["arm"])
            screens = tree["screens"].items()
            tree["screens"] = {int(key): Sample(**value) for key, value in screens}
            idea = Idea(**tree)
            names = f"{idea.arm.name} {idea.arm.commit}"
            if not _NAMES.fullmatch(names) or idea.number not in range(len(ideas) + 1):
                raise ValueError("the line does not describe an idea")
            if idea.best and ideas[idea.best].answer != Answer.KEEP:
                raise ValueError("the idea's best version was not accepted before it")
            ideas[idea.number] = idea
            if idea.seeds:
                ledger.tests.setdefault(idea.number)
    ledger.ideas = list(ideas.values())
    return ledger


def append(root: Path, idea: Idea) -> None:
    """Append the state of an idea to ledger.jsonl. The caller must hold the lock of the ledger.

    If the process is killed meanwhile, readers ignore the incomplete line.
    """
    with open(root / "ledger.jsonl", "ab+") as file:
        file.seek(0)
        lines = _whole_lines(file.read())
        # Remove a last line that is incomplete because a process was killed.
        file.truncate(sum(map(len, lines)))
        if lines and not lines[-1].endswith(b"\n"):  # an editor removed the line end
            file.write(b"\n")
        before = json.loads(lines[-1])["crc32"] if lines else 0
        tree = vars(idea) | {"arm": idea.arm.to_tree()}
        line = tree | {"crc32": _checksum(tree, before)}
        file.write(json.dumps(line, default=vars).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _checksum(tree: dict, before: int) -> int:
    """Return the checksum of a line and of all lines before it.

    `tree` is the content of the line, and `before` is the checksum of the lines before it.
    """
    return zlib.crc32(json.dumps(tree, default=vars).encode(), before)


def _whole_lines(text: bytes) -> list[bytes]:
    """Return the lines of `text`, without an incomplete last line.

    The last line is incomplete if a process was killed while it wrote the line.
    """
    lines = text.splitlines(keepends=True)
    if lines and lines[-1].startswith(b"{") and not lines[-1].endswith(b"\n"):
        try:
            json.loads(lines[-1])
        except ValueError:
            lines.pop()
    return lines
