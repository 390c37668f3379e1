"""A sweep: its arms, its seeds, its terms, and the runs that follow from them."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from gpt2.ablate.arms import Arm
from gpt2.ablate.results import Result, read_json, read_result
from gpt2.ablate.runs import Run, check_unchanged, make_choosing_run, make_run
from gpt2.config import MAX_SEED, Config, differences
from gpt2.errors import UserError
from gpt2.utils.files import locked, write_json

# Seeds of runs that choose values begin this much above those of runs that are compared.
CHOOSING_SEEDS = 1000


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What is compared with what, and how.

    Attributes:
        root: its directory.
        command: the command line that began it, for the report.
        arms: on equal terms, the baseline first.
        score: the metric that is compared, of the last validation.
        equal: what the arms have alike, one of `gpt2.ablate.equal.TERMS`.
        paired: whether runs are compared seed by seed.
        num_seeds: runs of each arm.
        tune: for each option that is tuned, its values.
        num_tune_seeds: runs of each arm for each choice of these values.
        until: half the width of an interval below which no seed is added; 0: none is added.
    """

    root: Path
    command: str
    arms: tuple[Arm, ...]
    score: str
    equal: str
    paired: bool
    num_seeds: int
    tune: Mapping[str, Sequence[Any]]
    num_tune_seeds: int
    until: float

    @property
    def baseline(self) -> Arm:
        """The arm that the others are compared with; at several sizes, that of the first size."""
        return self.arms[0]

    def groups(self) -> list[list[Arm]]:
        """Returns the arms of each size, its baseline first. Arms of one group are compared."""
        sizes = dict.fromkeys(arm.size for arm in self.arms)
        return [[arm for arm in self.arms if arm.size == size] for size in sizes]

    @property
    def unit(self) -> str:
        """The unit of the score."""
        return "nats per token" if self.score == "eval/loss" else "bits per byte"

    def with_seeds(self, number: int) -> "Sweep":
        """Returns the sweep with more runs of each arm."""
        return dataclasses.replace(self, num_seeds=number)

    def choices(self) -> list[dict[str, Any]]:
        """Returns every choice of values for the options that are tuned; none if none is."""
        if not self.tune:
            return []
        return [
            dict(zip(self.tune, values, strict=True))
            for values in itertools.product(*self.tune.values())
        ]

    def choosing_runs(self) -> list[Run]:
        """Returns the runs that choose between values, whose seeds are not used again."""
        first = self.baseline.config.seed + CHOOSING_SEEDS
        return [
            make_choosing_run(self.root, arm.name, arm.config, first + i, choice)
            for i in range(self.num_tune_seeds)
            for arm in self.arms
            for choice in self.choices()
        ]

    def tuning(self) -> dict[str, list[tuple[dict[str, Any], float]]]:
        """Returns each arm's choices and their mean scores; nan where a run has no score."""
        scores: dict[str, list[tuple[dict[str, Any], float]]] = {}
        results = [read_result(run, self.score) for run in self.choosing_runs()]
        for arm in self.arms:
            scores[arm.name] = [
                (
                    choice,
                    mean(
                        result.score(self.score)
                        for result in results
                        if result.run.arm == arm.name and result.run.tuned == choice
                    ),
                )
                for choice in self.choices()
            ]
        return scores

    def chosen(self) -> dict[str, dict[str, Any] | None]:
        """Returns each arm's best choice; None if none of its choices has a score."""
        if not self.tune:
            return {arm.name: {} for arm in self.arms}
        best: dict[str, dict[str, Any] | None] = {}
        for name, scores in self.tuning().items():
            finite = [(score, i) for i, (_, score) in enumerate(scores) if math.isfinite(score)]
            best[name] = scores[min(finite)[1]][0] if finite else None
        return best

    def runs(self) -> list[Run]:
        """Returns the runs that are compared, seed by seed; all arms' choices must have ended."""
        chosen, first = self.chosen(), self.baseline.config.seed
        return [
            make_run(self.root, arm.name, arm.config, first + i, choice)
            for i in range(self.num_seeds)
            for arm in self.arms
            if (choice := chosen[arm.name]) is not None
        ]

    def results(self) -> list[Result]:
        """Returns what the compared runs gave so far."""
        return [read_result(run, self.score) for run in self.runs()]

    def check(self) -> None:
        """Checks that runs which exist belong to this sweep.

        Raises:
            UserError: they were asked for with other options, or there are too many seeds.
        """
        if self.baseline.config.seed + CHOOSING_SEEDS + self.num_tune_seeds > MAX_SEED:
            raise UserError(
                f"seed={self.baseline.config.seed} leaves no room for seeds", "Use a smaller one"
            )
        if self.num_seeds > CHOOSING_SEEDS:
            raise UserError(
                f"--seeds={self.num_seeds} is too large", f"Use at most {CHOOSING_SEEDS}"
            )
        check_unchanged(self.choosing_runs())
        if all(run.outcome().state != "waiting" for run in self.choosing_runs()):
            check_unchanged(self.runs())

    def save(self) -> None:
        """Writes sweep.json."""
        tree = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del tree["root"]
        arms = [
            {"change": arm.change, "size": arm.size, "config": arm.config.to_dict()}
            for arm in self.arms
        ]
        with locked(self.root / ".sweep.lock"):  # jobs of an array save at once
            write_json(self.root / "sweep.json", tree | {"arms": arms})


def load_sweep(root: Path) -> Sweep:
    """Reads the sweep of a directory.

    Raises:
        UserError: there is none, or its file is damaged.
    """
    path = root / "sweep.json"
    if not path.is_file():
        raise UserError(f"{root} holds no sweep (no sweep.json)", "Give the --workdir of a sweep")
    tree = read_json(path)
    try:
        arms = tuple(
            Arm(each["change"], Config.from_dict(each["config"]), each["size"])
            for each in tree.pop("arms")
        )
        return Sweep(root=root, arms=arms, **tree)
    except (AttributeError, KeyError, TypeError, UserError) as error:
        raise UserError(f"{path} is damaged ({error})", "Give another --workdir") from None


def continued(sweep: Sweep) -> Sweep:
    """Returns the sweep with the arms and seeds that an earlier command gave its directory.

    Raises:
        UserError: the earlier sweep had another baseline or other terms.
    """
    if not (sweep.root / "sweep.json").exists():
        return sweep
    before = load_sweep(sweep.root)
    for name, (old, new) in differences(before.baseline.config, sweep.baseline.config).items():
        raise UserError(
            f"{sweep.root} holds a sweep whose baseline has {name}={old}, not {new}",
            "Give another --workdir, or the old value of the option",
        )
    for flag, field in (("equal", "equal"), ("paired", "paired"), ("tune", "tune")):
        old, new = getattr(before, field), getattr(sweep, field)
        if old != new:
            raise UserError(
                f"{sweep.root} holds a sweep with --{flag}={old}, not {new}; what is decided "
                "before the runs holds for all of them",
                "Give another --workdir, or the flag as it was",
            )
    ours = {arm.name: arm for arm in sweep.arms}
    return dataclasses.replace(
        sweep,
        command=before.command,
        arms=(*before.arms, *(arm for name, arm in ours.items() if name not in _names(before))),
        num_seeds=max(before.num_seeds, sweep.num_seeds),
        num_tune_seeds=max(before.num_tune_seeds, sweep.num_tune_seeds),
    )


def _names(sweep: Sweep) -> set[str]:
    return {arm.name for arm in sweep.arms}
