"""A sweep: its arms, its seeds, its terms, and the runs that follow from them."""

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from gpt2.ablate.arms import Arm
from gpt2.ablate.equal import choose_score
from gpt2.ablate.results import Result, read_result
from gpt2.ablate.runs import Run, changes, check_unchanged, make_choosing_run, make_run
from gpt2.config import MAX_SEED, Config, complete_record
from gpt2.data.dataset import differing_data, read_data
from gpt2.errors import MALFORMED, UserError
from gpt2.utils.files import locked, write_json

# Seeds of runs that choose values begin this much above those of runs that are compared.
CHOOSING_SEEDS = 1000

LEAST_SEEDS = 3  # where --until may begin: with two, widths are often small by chance
MAX_SEEDS = 20  # where --until gives up by itself

# Decided before the first run, for all runs.
_TERMS = ("equal", "paired", "tune", "num_tune_seeds")


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What is compared with what, and how.

    Attributes:
        root: its directory.
        commands: the command lines that made it, for the report.
        arms: on equal terms, the baseline first.
        score: the metric that is compared, of the last validation.
        equal: what the arms have alike, one of `gpt2.ablate.equal.TERMS`.
        paired: whether runs are compared seed by seed.
        num_seeds: runs of each arm.
        tune: for each option that is tuned, its values.
        num_tune_seeds: runs of each arm for each choice of these values.
        until: half the width of an interval below which no seed is added; 0: none is added.
        max_seeds: how many seeds `until` adds to at most.
        first_num_seeds: `num_seeds` before any run had ended.
        seeds_were_raised: whether a command asked for more seeds, or for `until`, after runs had
            ended.
        chosen: each arm's best choice of the values that are tuned, once all its choosing runs
            have ended; None if none of them has a score. It stays, whatever is trained later.
    """

    root: Path
    commands: Sequence[str]
    arms: tuple[Arm, ...]
    score: str
    equal: str
    paired: bool
    num_seeds: int
    tune: Mapping[str, Sequence[Any]]
    num_tune_seeds: int
    until: float
    first_num_seeds: int
    max_seeds: int = MAX_SEEDS
    seeds_were_raised: bool = False
    chosen: Mapping[str, Mapping[str, Any] | None] = dataclasses.field(default_factory=dict)

    @property
    def baseline(self) -> Arm:
        """The arm that the others are compared with; at several sizes, that of the first size."""
        return self.arms[0]

    @property
    def unit(self) -> str:
        """The unit of the score."""
        return "nats per token" if self.score == "eval/loss" else "bits per byte"

    def groups(self) -> list[list[Arm]]:
        """Returns the arms of each size, its baseline first. Arms of one group are compared."""
        sizes = dict.fromkeys(arm.size for arm in self.arms)
        return [[arm for arm in self.arms if arm.size == size] for size in sizes]

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

    def undecided_runs(self) -> list[Run]:
        """Returns those of `choosing_runs` whose arms have no choice yet."""
        return [run for run in self.choosing_runs() if run.arm not in self.chosen]

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

    def with_choices(self, *, leave_failed: bool = False) -> "Sweep":
        """Returns the sweep with the choices of those arms whose choosing runs have all ended.

        A run that failed has not, unless `leave_failed`: the next command tries it again.
        """
        if not self.tune:
            return dataclasses.replace(self, chosen={arm.name: {} for arm in self.arms})
        states = [(run.arm, run.outcome().state) for run in self.choosing_runs()]
        failed_arms = {arm for arm, state in states if state == "failed"}
        open_arms = {arm for arm, state in states if state == "waiting"}
        open_arms |= set() if leave_failed else failed_arms
        chosen = dict(self.chosen)
        for name, scores in self.tuning().items():
            if name not in chosen and name not in open_arms:
                finite = [(score, i) for i, (_, score) in enumerate(scores) if math.isfinite(score)]
                if finite:
                    chosen[name] = scores[min(finite)[1]][0]
                elif name not in failed_arms:
                    chosen[name] = None  # all diverged
        return dataclasses.replace(self, chosen=chosen)

    def runs(self) -> list[Run]:
        """Returns the runs that are compared, seed by seed, of the arms that have their choice."""
        first = self.baseline.config.seed
        return [
            make_run(self.root, arm.name, arm.config, first + i, choice)
            for i in range(self.num_seeds)
            for arm in self.arms
            if (choice := self.chosen.get(arm.name)) is not None
        ]

    def numbered_run(self, number: int) -> Run:
        """Returns a run by its place in the list: those that choose, then those that are compared.

        Raises:
            UserError: there is no such run, or it has no number yet: while an arm has no choice,
                numbers beyond the runs that choose would come to mean other runs.
        """
        runs, how = self.choosing_runs(), ""
        if all(arm.name in self.chosen for arm in self.arms):
            runs += self.runs()
        else:
            how = "; runs that compare have numbers once those that choose have ended well"
        if not 0 <= number < len(runs):
            how = f"Use 0 to {len(runs) - 1}{how}"
            raise UserError(f"--index={number} is not one of the sweep's runs", how)
        return runs[number]

    def results(self) -> list[Result]:
        """Returns what the compared runs gave so far."""
        return [read_result(run, self.score) for run in self.runs()]

    def check(self) -> None:
        """Checks that the runs which exist belong to this sweep, and learnt from the same text.

        Raises:
            UserError: they were asked for with other options, read another text, or there are too
                many seeds.
        """
        if self.baseline.config.seed + CHOOSING_SEEDS + self.num_tune_seeds > MAX_SEED:
            raise UserError(
                f"seed={self.baseline.config.seed} leaves no room for seeds", "Use a smaller one"
            )
        if self.num_seeds > CHOOSING_SEEDS:
            raise UserError(
                f"--seeds={self.num_seeds} is too large", f"Use at most {CHOOSING_SEEDS}"
            )
        runs = [*self.choosing_runs(), *self.runs()]
        check_unchanged(runs)
        texts: dict[Any, tuple[dict | None, Run]] = {}
        for run in runs:
            if (path := run.workdir / "data.json").exists():
                found = read_data(path)
                text, first = texts.setdefault(run.config.data, (found, run))
                if text is None or found is None or differing_data(text, found):
                    raise UserError(
                        f"{run.folder} was trained on another text than {first.folder}, though "
                        "both name it alike",
                        "Restore the text, and give another --workdir",
                    )

    def save(self) -> None:
        """Writes sweep.json."""
        tree = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del tree["root"]
        arms = [
            {"change": arm.change, "size": arm.size, "config": arm.config.to_dict()}
            for arm in self.arms
        ]
        write_json(self.root / "sweep.json", tree | {"arms": arms})


def load_sweep(root: Path) -> Sweep:
    """Reads the sweep of a directory.

    Raises:
        UserError: there is none, or its file is damaged.
    """
    path = root / "sweep.json"
    if not path.is_file():
        raise UserError(f"{root} holds no sweep (no sweep.json)", "Give the --workdir of a sweep")
    try:
        tree = json.loads(path.read_text())
        arms = tuple(
            Arm(
                each["change"],
                Config.from_dict(complete_record(each["config"], path)),
                each["size"],
            )
            for each in tree.pop("arms")
        )
        return Sweep(root=root, arms=arms, **tree)
    except (*MALFORMED, UserError) as error:
        raise UserError(f"{path} is damaged ({error})", "Give another --workdir") from None


def register(sweep: Sweep, *, leave_failed: bool = False) -> Sweep:
    """Adds a sweep to what its directory holds, writes sweep.json, and returns all of it.

    Jobs of an array may do so at once. `leave_failed` is as for `Sweep.with_choices`.

    Raises:
        UserError: the directory's sweep has another baseline, other terms, or other runs.
    """
    sweep.root.mkdir(parents=True, exist_ok=True)
    with locked(sweep.root / ".sweep.lock"):
        merged = continued(sweep).with_choices(leave_failed=leave_failed)
        merged.check()
        if not (sweep.root / "sweep.json").exists() or merged != load_sweep(sweep.root):
            merged.save()
    return merged


def continued(sweep: Sweep) -> Sweep:
    """Returns the sweep with the arms, seeds and choices that its directory has already.

    Raises:
        UserError: the directory's sweep has another baseline, other terms, or an arm of the same
            name with other options.
    """
    if not (sweep.root / "sweep.json").exists():
        return sweep
    before = load_sweep(sweep.root)
    for field in _TERMS:
        old, new = getattr(before, field), getattr(sweep, field)
        if old != new:
            flag = {"num_tune_seeds": "tune_seeds"}.get(field, field)
            raise UserError(
                f"{sweep.root} holds a sweep with --{flag}={old}, not {new}; what is decided "
                "before the runs holds for all of them",
                "Give another --workdir, or the flag as it was",
            )
    known, arms = {arm.name: arm for arm in before.arms}, list(before.arms)
    for arm in sweep.arms:
        if arm.name not in known:
            if all(arm.config != other.config for other in before.arms):
                arms.append(arm)
            continue
        for name, (old, new) in changes(known[arm.name].config, arm.config).items():
            raise UserError(
                f"{sweep.root} holds a sweep whose arm {arm.name} has {name}={old}, not {new}",
                "Give another --workdir, or the old value of the option",
            )
    if choose_score(arms) != before.score:
        raise UserError(
            f"the arms of {sweep.root} were compared in {before.unit}, and the new ones have "
            "another tokenizer",
            "Give another --workdir",
        )
    runs_exist = any(run.outcome().state != "waiting" for run in before.runs())
    # `--until` itself adds to `num_seeds` alone.
    raised = sweep.first_num_seeds > before.num_seeds or _adds_more(sweep, before)
    return dataclasses.replace(
        sweep,
        commands=list(dict.fromkeys([*before.commands, *sweep.commands])),
        arms=tuple(arms),
        num_seeds=max(before.num_seeds, sweep.num_seeds),
        until=sweep.until or before.until,
        max_seeds=sweep.max_seeds if sweep.until else before.max_seeds,
        seeds_were_raised=before.seeds_were_raised or bool(runs_exist and raised),
        first_num_seeds=(
            before.first_num_seeds if runs_exist else max(before.num_seeds, sweep.num_seeds)
        ),
        chosen=before.chosen,
    )


def _adds_more(sweep: Sweep, before: Sweep) -> bool:
    """Returns whether `--until` asks for more seeds than it did before."""
    if not (sweep.until and before.until):
        return bool(sweep.until)
    return sweep.until < before.until or sweep.max_seeds > before.max_seeds
