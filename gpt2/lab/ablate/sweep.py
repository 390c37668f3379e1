"""A sweep: its arms, its seeds, its terms, and the runs that follow from them."""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from gpt2.config import DataConfig, with_options
from gpt2.errors import UserError
from gpt2.lab.ablate.arms import Arm, differences, refuse_differences
from gpt2.lab.ablate.results import read_results
from gpt2.lab.ablate.runs import ENDED, Run, Setting, Settings, describe
from gpt2.lab.ablate.terms import LOSS, choose_score
from gpt2.utils.files import locked, reading, write_json

# The seed of runs that choose values is that far above those of runs that are compared.
CHOOSING_SEED = 1000


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What is compared with what, and how."""

    root: Path
    commands: Sequence[str]  # the command lines that made it, for the report
    arms: tuple[Arm, ...]  # on equal terms, the baseline first
    equal: str  # what the arms have alike, one of terms.TERMS
    # Seeds of each arm; of several numbers, each is a look that may end it.
    looks: list[int]
    tune: Sequence[Sequence[Settings]]  # for each `--tune`, its values
    # Of arms that got more than the first look's.
    seeds: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # Seeds when a command asked for more after runs had ended; else 0.
    raised_from: int = 0
    # Each arm's best choice of the values that are tuned, once all its choosing runs have ended;
    # the first if all diverged. It stays, whatever is trained later.
    chosen: Mapping[str, Settings] = dataclasses.field(default_factory=dict)

    @property
    def score(self) -> str:
        """The metric that is compared, of the last validation."""
        return choose_score(self.arms)

    @property
    def unit(self) -> str:
        """The unit of the score."""
        return "nats per token" if self.score == LOSS else "bits per byte"

    def choosing_runs(self) -> list[Run]:
        """Returns the runs that choose between the values of options that are tuned.

        Each arm tries every combination. Their seed is not used again.
        """
        runs = list[Run]()
        if not self.tune:
            return runs
        for arm in self.arms:
            for values in itertools.product(*self.tune):
                choice = dict[str, Setting]()
                for value in values:
                    choice |= value
                runs.append(self._run(arm, CHOOSING_SEED, choice))
        return runs

    def undecided_runs(self) -> list[Run]:
        """Returns those of `choosing_runs` whose arms have no choice yet."""
        runs = self.choosing_runs()
        return [run for run in runs if run.arm not in self.chosen]

    def num_seeds(self, arm: Arm) -> int:
        """Returns how many seeds an arm has so far."""
        return self.seeds.get(arm.name, self.looks[0])

    def runs(self) -> list[Run]:
        """Returns the runs that are compared, seed by seed, of the arms that have their choice."""
        runs = []
        most = max(map(self.num_seeds, self.arms))
        for i in range(most):
            for arm in self.arms:
                choice = self.chosen.get(arm.name)
                if choice is not None and i < self.num_seeds(arm):
                    runs.append(self._run(arm, i, choice))
        return runs

    def _run(self, arm: Arm, number: int, choice: Settings) -> Run:
        chooses = number == CHOOSING_SEED
        folder = self.root / "runs" / arm.name
        if chooses:
            folder = self.root / "tune" / arm.name / describe(choice)
        seed = self.arms[0].config.seed + number
        return Run(
            arm=arm.name,
            config=with_options(arm.config, {**choice, "seed": seed}),
            folder=folder / f"seed-{seed}",
            tuned=choice,
            chooses=chooses,
            source=arm.source(self.root),
            extra=arm.extra,
        )

    def all_runs(self) -> list[Run]:
        """Returns the runs that choose, and those that are compared."""
        return [*self.choosing_runs(), *self.runs()]

    def with_choices(self) -> "Sweep":
        """Returns the sweep with the choices of those arms whose choosing runs have all ended.

        A run that failed has not: the next command tries it again.
        """
        chosen = dict(self.chosen)
        if not self.tune:
            chosen = {arm.name: {} for arm in self.arms}
        runs = self.undecided_runs()
        scores = read_results(runs, self.score)
        for arm in dict.fromkeys(run.arm for run in runs):
            rows = scores[scores.arm == arm]
            if rows.state.isin(ENDED).all():
                best = rows.score.fillna(np.inf).idxmin()
                chosen[arm] = runs[best].tuned
        return dataclasses.replace(self, chosen=chosen)

    def results(self) -> pd.DataFrame:
        """Returns what all runs gave so far; see `read_results`."""
        return read_results(self.all_runs(), self.score)

    def check_runs(self, *, to_come: bool = False) -> None:
        """Raises a UserError if runs are of other text, under the same name, or of other code.

        Those to come count by the code that would train them, if they do.
        """
        texts: dict[DataConfig, tuple[bytes, Run]] = {}  # and who has it first
        codes: dict[Path, tuple[str, Run]] = {}
        for run in self.all_runs():
            run.read(self.score)
            for own in sorted(run.codes(to_come=to_come)):
                old, first = codes.setdefault(run.source, (own, run))
                if old != own:
                    raise UserError(
                        f"{self.root} would pool runs of different code"
                        f" ({first.label} is of {old}, {run.label} of {own})",
                        "Put the code back, or give another --workdir",
                    )
            path = run.workdir / "data.json"
            if not path.exists():
                continue
            data = path.read_bytes()
            text, first = texts.setdefault(run.config.data, (data, run))
            if text != data:
                raise UserError(
                    f"{run.folder} was trained on another text than {first.folder}",
                    "Give another --workdir",
                )

    def save(self) -> None:
        """Writes sweep.json."""
        arms = [arm.to_tree() for arm in self.arms]
        tree = vars(self) | {"root": "", "arms": arms}
        write_json(self.root / "sweep.json", tree)


def load_sweep(root: Path) -> Sweep:
    """Reads the sweep of a directory."""
    path = root / "sweep.json"
    with reading(path, "Give the --workdir of a sweep, or remove the file"):
        tree = json.loads(path.read_bytes())
        arms = tuple(Arm.from_options(**arm) for arm in tree["arms"])
        return Sweep(**tree | {"root": root, "arms": arms})


def register(sweep: Sweep) -> Sweep:
    """Adds a sweep to what its directory holds, writes sweep.json, and returns all of it."""
    with locked(sweep.root / ".sweep.lock"):  # several processes may do so at once
        merged = continued(sweep).with_choices()
        merged.check_runs(to_come=True)
        merged.save()
    return merged


def continued(sweep: Sweep) -> Sweep:
    """Returns the sweep with the arms, seeds and choices that its directory has already.

    What would mix runs of other terms or options is a UserError.
    """
    if not (sweep.root / "sweep.json").exists():
        return sweep
    before = load_sweep(sweep.root)
    arms = {arm.name: arm for arm in before.arms}
    clashes: dict[str, tuple[object, object]] = {}
    for arm in sweep.arms:
        known = arms.setdefault(arm.name, arm)
        clashes |= differences(known, arm)
    clashes["equal"] = (before.equal, sweep.equal)
    clashes["tune"] = (before.tune, sweep.tune)
    looks_once = len(before.looks) == len(sweep.looks) == 1
    if not looks_once:
        clashes["seeds"] = (before.looks, sweep.looks)
    how = "Give another --workdir, or the old values"
    refuse_differences(f"{sweep.root} holds a sweep", clashes, how)
    raised_from = before.raised_from
    if sweep.looks > before.looks and not raised_from:
        states = {run.outcome().state for run in before.runs()}
        if states != {"waiting"}:
            raised_from = before.looks[-1]
    commands = dict.fromkeys([*before.commands, *sweep.commands])
    return dataclasses.replace(
        sweep,
        commands=list(commands),
        arms=tuple(arms.values()),
        looks=max(before.looks, sweep.looks),
        seeds={**before.seeds, **sweep.seeds},
        raised_from=raised_from,
        chosen=before.chosen,
    )
