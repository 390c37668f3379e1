"""A sweep: its arms, its seeds, its terms, and the runs that follow from them."""

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd

from gpt2.ablate.arms import Arm, differences
from gpt2.ablate.results import read_results
from gpt2.ablate.runs import Run, describe
from gpt2.ablate.terms import LOSS, choose_score
from gpt2.config import Config, with_options
from gpt2.errors import UserError
from gpt2.training.code import SOURCE, hash_code
from gpt2.utils.files import locked, write_json

CHOOSING_SEEDS = (
    1000  # by which seeds of runs that choose values are above those compared
)
_DECIDED = (
    "equal",
    "paired",
    "tune",
    "num_tune_seeds",
)  # before the first run, for all runs


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What is compared with what, and how."""

    root: Path
    commands: Sequence[str]  # the command lines that made it, for the report
    arms: tuple[Arm, ...]  # on equal terms, the baseline first; size by size
    score: str  # the metric that is compared, of the last validation
    equal: str  # what the arms have alike, one of terms.TERMS
    paired: bool  # whether runs are compared seed by seed
    looks: list[
        int
    ]  # seeds of each arm; of several numbers, each is a look that may end it
    tune: Mapping[str, Sequence[Any]]  # for each option that is tuned, its values
    num_tune_seeds: int  # runs of each arm for each choice of these values
    find: float = (
        0.0  # the difference that seeds are planned for, by the first of them; or 0
    )
    seeds: Mapping[str, int] = dataclasses.field(
        default_factory=dict
    )  # of arms that got more
    raised_from: int = (
        0  # seeds when a command asked for more after runs had ended; else 0
    )
    # Each arm's best choice of the values that are tuned, once all its choosing runs have ended;
    # None if all diverged. It stays, whatever is trained later.
    chosen: Mapping[str, Mapping[str, Any] | None] = dataclasses.field(
        default_factory=dict
    )

    @property
    def unit(self) -> str:
        """The unit of the score."""
        return "nats per token" if self.score == LOSS else "bits per byte"

    def groups(self) -> list[list[Arm]]:
        """Returns the arms of each size, its baseline first. Arms of one group are compared."""
        sizes = dict.fromkeys(arm.size for arm in self.arms)
        return [[arm for arm in self.arms if arm.size == size] for size in sizes]

    def choices(self) -> list[dict[str, Any]]:
        """Returns every choice of values for the options that are tuned; none if none is."""
        grid = itertools.product(*self.tune.values()) if self.tune else ()
        return [dict(zip(self.tune, values, strict=True)) for values in grid]

    def choosing_runs(self) -> list[Run]:
        """Returns the runs that choose between values, whose seeds are not used again."""
        return [
            self._run(arm, CHOOSING_SEEDS + i, choice, chooses=True)
            for i in range(self.num_tune_seeds)
            for arm in self.arms
            for choice in self.choices()
        ]

    def undecided_runs(self) -> list[Run]:
        """Returns those of `choosing_runs` whose arms have no choice yet."""
        return [run for run in self.choosing_runs() if run.arm not in self.chosen]

    def num_seeds(self, arm: Arm) -> int:
        """Returns how many seeds an arm has so far."""
        return max(self.looks[0], self.seeds.get(arm.name, 0))

    def runs(self) -> list[Run]:
        """Returns the runs that are compared, seed by seed, of the arms that have their choice."""
        return [
            self._run(arm, i, choice)
            for i in range(max(self.num_seeds(arm) for arm in self.arms))
            for arm in self.arms
            if i < self.num_seeds(arm)
            and (choice := self.chosen.get(arm.name)) is not None
        ]

    def _run(
        self, arm: Arm, seed: int, choice: Mapping[str, Any], chooses: bool = False
    ) -> Run:
        seed += self.arms[0].config.seed
        folder = self.root / "runs" / arm.name
        if chooses:
            folder = self.root / "tune" / arm.name / describe(choice)
        config = with_options(arm.config, {**choice, "seed": seed})
        source = arm.source(self.root)
        return Run(arm.name, config, folder / f"seed-{seed}", choice, chooses, source)

    def tuning(self) -> dict[str, list[tuple[dict[str, Any], float]]]:
        """Returns each arm's choices and their mean scores; nan where a run has no score."""
        if not self.tune:
            return {}
        results = read_results(self.choosing_runs(), self.score)
        means = results.groupby(["arm", "values"]).score.agg(mean)
        return {
            arm.name: [
                (each, means[arm.name, describe(each)]) for each in self.choices()
            ]
            for arm in self.arms
        }

    def with_choices(self, *, leave_failed: bool = False) -> "Sweep":
        """Returns the sweep with the choices of those arms whose choosing runs have all ended.

        A run that failed has not, unless `leave_failed`: the next command tries it again.
        """
        if not self.tune:
            return dataclasses.replace(self, chosen={arm.name: {} for arm in self.arms})
        chosen = dict(self.chosen)
        runs = self.undecided_runs()
        for name, tried in self.tuning().items():
            states = {run.outcome().state for run in runs if run.arm == name}
            if (
                not states
                or "waiting" in states
                or ("failed" in states and not leave_failed)
            ):
                continue
            if scored := [pair for pair in tried if math.isfinite(pair[1])]:
                chosen[name] = min(scored, key=lambda pair: pair[1])[0]
            elif "failed" not in states:
                chosen[name] = None
        return dataclasses.replace(self, chosen=chosen)

    def results(self) -> pd.DataFrame:
        """Returns what all runs gave so far; see `read_results`."""
        return read_results([*self.choosing_runs(), *self.runs()], self.score)

    def check_runs(self, now: str = "") -> None:
        """Raises a UserError if runs are of other text, under the same name, or of other code.

        Runs to come are left out where `now` is "", the hash of the working tree.
        """
        texts: dict[Any, tuple[str, Run]] = {}
        labels: dict[tuple[Path, str], list[str]] = {}  # of the runs of each code
        for run in (*self.choosing_runs(), *self.runs()):
            for code in run.codes(
                hash_code(run.source) if now and run.source != SOURCE else now
            ):
                labels.setdefault((run.source, code), []).append(run.label)
            if (path := run.workdir / "data.json").exists():
                text, first = texts.setdefault(run.config.data, (path.read_text(), run))
                what = f"{run.folder} was trained on another text than {first.folder}"
                if text != path.read_text():
                    raise UserError(what, "Give another --workdir")
        told = [
            f"{len(runs)} of {code}, such as {runs[0]}"
            for (_, code), runs in labels.items()
        ]
        what = f"{self.root} would pool runs of different code ({'; '.join(told)})"
        pools = len(labels) > len({source for source, _ in labels})
        if pools:
            raise UserError(what, "Put the code back, or give another --workdir")

    def save(self) -> None:
        """Writes sweep.json."""
        tree = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
        del tree["root"]
        tree["arms"] = [
            vars(arm) | {"config": arm.config.to_dict()} for arm in self.arms
        ]
        write_json(self.root / "sweep.json", tree)


def load_sweep(root: Path) -> Sweep:
    """Reads the sweep of a directory."""
    path = root / "sweep.json"
    if not path.exists():
        raise UserError(f"{root} holds no sweep", "Give the --workdir of a sweep")
    tree = json.loads(path.read_text())
    arms = [
        Arm(**each | {"config": Config.from_dict(each["config"])})
        for each in tree["arms"]
    ]
    return Sweep(**tree | {"root": root, "arms": tuple(arms)})


def register(sweep: Sweep, *, leave_failed: bool = False) -> Sweep:
    """Adds a sweep to what its directory holds, writes sweep.json, and returns all of it."""
    with locked(sweep.root / ".sweep.lock"):  # several processes may do so at once
        merged = continued(sweep).with_choices(leave_failed=leave_failed)
        merged.check_runs(hash_code())
        merged.save()
    return merged


def continued(sweep: Sweep) -> Sweep:
    """Returns the sweep with the arms, seeds and choices that its directory has already.

    What would mix runs of other terms or options is a UserError.
    """
    if not (sweep.root / "sweep.json").exists():
        return sweep
    before = load_sweep(sweep.root)
    known = {arm.name: arm for arm in before.arms}
    arms = list(before.arms)
    clashes = {each: (getattr(before, each), getattr(sweep, each)) for each in _DECIDED}
    for arm in sweep.arms:
        if arm.name in known:
            clashes |= differences(known[arm.name].config, arm.config)
            clashes[f"commits of {arm.name}"] = known[arm.name].commit, arm.commit
        elif all(
            dataclasses.replace(arm, change=each.change) != each for each in before.arms
        ):
            arms.append(arm)
    clashes["score"] = before.score, choose_score(arms)
    if max(len(before.looks), len(sweep.looks)) > 1 or before.find:
        clashes["seeds"] = before.looks, sweep.looks
    for name, (old, new) in clashes.items():
        what = f"{sweep.root} holds a sweep with {name}={old}, not {new}"
        if old != new:
            raise UserError(what, "Give another --workdir, or the old value")
    seen = any(run.outcome().state != "waiting" for run in before.runs())
    find = min(filter(None, (before.find, sweep.find)), default=0.0)
    raised = seen and (sweep.looks > before.looks or find != before.find)
    seeds = [
        pair for s in (before, sweep) if s.find == find for pair in s.seeds.items()
    ]
    return dataclasses.replace(
        sweep,
        commands=list(dict.fromkeys([*before.commands, *sweep.commands])),
        arms=tuple(arms),
        score=before.score,
        looks=max(before.looks, sweep.looks),
        find=find,
        seeds=dict(sorted(seeds)),
        raised_from=before.raised_from or (before.looks[-1] if raised else 0),
        chosen=before.chosen,
    )
