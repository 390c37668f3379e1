"""A sweep: its arms (variants), its seeds, what all runs have in common, and the list of runs."""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from gpt2.errors import UserError
from gpt2.lab.experiments.arms import Arm, Differences, differences, refuse_differences
from gpt2.lab.experiments.results import check_comparable, read_results
from gpt2.lab.experiments.run_folder import ENDED, Run, Setting, Settings, describe
from gpt2.lab.experiments.terms import LOSS, choose_score
from gpt2.utils.files import locked, reading, write_json

# The seeds of tuning runs begin at the config's seed plus this number. No compared run uses them,
# because an arm has at most this number of seeds.
CHOOSING_SEED = 1000


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The arms (variants) of an ablation, and the settings that all arms share, such as `equal`."""

    root: Path  # the folder of the sweep
    commands: Sequence[str]  # all command lines that were used, for the report
    # The first is the baseline. Each arm's number of steps follows from `equal`.
    arms: tuple[Arm, ...]
    equal: str  # the training cost that is the same for all arms, one of terms.TERMS
    # The results are analysed when arms have these numbers of seeds, in ascending order. No arm has
    # more seeds than the last number.
    analyses: list[int]
    tune: Sequence[Sequence[Settings]]  # the values of each `--tune`
    tune_seeds: int = 1  # number of tuning runs per arm and combination of values
    paired: bool = False  # whether arms are judged by pairs of runs with the same seed
    # Arm -> its number of seeds, for arms that continued after the first analysis. The other arms
    # have `analyses[0]` seeds.
    seeds: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # The earlier number of seeds, if a command increased it after runs had ended; otherwise 0.
    raised_from: int = 0
    # The tuned values of each arm whose tuning runs have all ended: the values with the best mean
    # score or, if each combination of values has a diverged run, the first combination. A later
    # command does not choose again.
    chosen: Mapping[str, Settings] = dataclasses.field(default_factory=dict)

    @property
    def score(self) -> str:
        """The name of the metric in which arms are compared, such as `eval/loss`.

        The last validation of a run measures it.
        """
        return choose_score(self.arms)

    @property
    def unit(self) -> str:
        """The unit of the score."""
        return "nats per token" if self.score == LOSS else "bits per byte"

    @property
    def amount(self) -> str:
        """The column of `results` with the compute of a run: `flops` or `seconds`."""
        return "seconds" if self.equal == "seconds" else "flops"

    def tuning_runs(self) -> list[Run]:
        """Return the runs that try the values of `--tune`.

        Each arm has `tune_seeds` such runs for each combination of values.
        """
        runs = list[Run]()
        if not self.tune:
            return runs
        for arm in self.arms:
            for values in itertools.product(*self.tune):
                choice = dict[str, Setting]()
                for value in values:
                    choice |= value
                for i in range(self.tune_seeds):
                    number = CHOOSING_SEED + i
                    runs.append(arm.make_run(self.root, number, choice, chooses=True))
        return runs

    def pending_tuning_runs(self) -> list[Run]:
        """Return the tuning runs of the arms whose values have not been chosen yet."""
        return [run for run in self.tuning_runs() if run.arm not in self.chosen]

    def num_seeds(self, arm: Arm) -> int:
        """Return the number of seeds that an arm has so far."""
        return self.seeds.get(arm.name, self.analyses[0])

    def runs(self) -> list[Run]:
        """Return the runs from which arms are judged, ordered by seed and then by arm.

        Tuning runs, and arms whose tuned values have not been chosen yet, are left out.
        """
        runs = []
        most = max(map(self.num_seeds, self.arms))
        for i in range(most):
            for arm in self.arms:
                choice = self.chosen.get(arm.name)
                if choice is not None and i < self.num_seeds(arm):
                    runs.append(arm.make_run(self.root, i, choice))
        return runs

    def all_runs(self) -> list[Run]:
        """Return the tuning runs, and then all other runs."""
        return [*self.tuning_runs(), *self.runs()]

    def with_choices(self) -> "Sweep":
        """Return the sweep with tuned values chosen for each arm whose tuning runs have all ended.

        The chosen values have the lowest mean score. A failed run does not count as ended, because
        the next command trains it again.
        """
        chosen = dict(self.chosen)
        if not self.tune:
            chosen = {arm.name: {} for arm in self.arms}
        runs = self.pending_tuning_runs()
        scores = read_results(runs, self.score)
        for arm in dict.fromkeys(run.arm for run in runs):
            rows = scores[scores.arm == arm]
            if rows.state.isin(ENDED).all():
                by_values = rows.score.fillna(np.inf).to_numpy()
                means = by_values.reshape(-1, self.tune_seeds).mean(1)
                best = rows.index[means.argmin() * self.tune_seeds]
                chosen[arm] = runs[best].tuned
        return dataclasses.replace(self, chosen=chosen)

    def results(self) -> pd.DataFrame:
        """Return a table of the results so far, with a row for each run; see `read_results`."""
        return read_results(self.all_runs(), self.score)

    def check_runs(self, *, to_come: bool = False) -> None:
        """Raise a UserError if runs cannot be compared; see `check_comparable`.

        With `to_come`, also check the code of runs that have not ended.
        """
        check_comparable(self.all_runs(), self.score, to_come=to_come)

    def save(self) -> None:
        """Write the sweep to sweep.json in its folder."""
        arms = [arm.to_tree() for arm in self.arms]
        tree = vars(self) | {"root": "", "arms": arms}
        write_json(self.root / "sweep.json", tree)


def load_sweep(root: Path) -> Sweep:
    """Read the sweep in the folder `root` from its sweep.json."""
    path = root / "sweep.json"
    with reading(path, "Use the --workdir of a sweep, or remove the file"):
        tree = json.loads(path.read_bytes())
        arms = tuple(Arm.from_options(**arm) for arm in tree["arms"])
        sweep = Sweep(**tree | {"root": root, "arms": arms})
        sweep.all_runs()  # raises an error if a value has the wrong type
        return sweep


def register(sweep: Sweep) -> Sweep:
    """Merge a sweep with the sweep in its folder, write sweep.json, and return the merged sweep."""
    # Several processes may register at the same time.
    with locked(sweep.root / ".sweep.lock"):
        merged = continued(sweep).with_choices()
        merged.check_runs(to_come=True)
        merged.save()
    return merged


def check_paired(sweep: Sweep, paired: bool) -> None:
    """Raise a UserError if the sweep began with another value of --paired than `paired`."""
    if paired != sweep.paired:
        began = "with" if sweep.paired else "without"
        raise UserError(
            f"The sweep in {sweep.root} began {began} --paired. This choice cannot change, because"
            " it must not depend on the losses",
            f"Repeat the command {began} --paired, or start a new sweep with another --workdir and"
            " a --config.seed that gives new seeds, such as 100",
        )


def _describe_tune(tune: Sequence[Sequence[Settings]]) -> str:
    """Return the values of each `--tune` as one string."""
    return " and ".join(",".join(map(describe, axis)) for axis in tune) or "nothing"


def continued(sweep: Sweep) -> Sweep:
    """Return the sweep, extended by the arms, seeds and tuned values in its folder's sweep.json.

    Raise a UserError if the sweep in the folder has other values of `--equal`, `--tune` or similar
    flags, or an arm with the same name but other options.
    """
    if not (sweep.root / "sweep.json").exists():
        return sweep
    before = load_sweep(sweep.root)
    check_paired(before, sweep.paired)
    arms = {arm.name: arm for arm in before.arms}
    changed = Differences()
    for arm in sweep.arms:
        known = arms.setdefault(arm.name, arm)
        changed |= differences(known, arm)
    changed["--equal"] = (before.equal, sweep.equal)
    changed["--tune"] = (_describe_tune(before.tune), _describe_tune(sweep.tune))
    changed["--tune_seeds"] = (before.tune_seeds, sweep.tune_seeds)
    # This command may add seeds only if neither it nor the earlier command has interim analyses.
    if max(len(before.analyses), len(sweep.analyses)) > 1:
        changed["--seeds"] = (
            ",".join(map(str, before.analyses)),
            ",".join(map(str, sweep.analyses)),
        )
    refuse_differences(
        f"{sweep.root} already contains a sweep",
        changed,
        "Use another --workdir, or the old values",
    )
    raised_from = before.raised_from
    if sweep.analyses > before.analyses and not raised_from:
        states = {run.outcome().state for run in before.runs()}
        if states - {"waiting"}:
            raised_from = before.analyses[-1]
    # Another command may have added seeds since this sweep was read.
    seeds = dict(before.seeds)
    for name, number in sweep.seeds.items():
        seeds[name] = max(number, seeds.get(name, 0))
    commands = dict.fromkeys([*before.commands, *sweep.commands])
    return dataclasses.replace(
        sweep,
        commands=list(commands),
        arms=tuple(arms.values()),
        analyses=max(before.analyses, sweep.analyses),
        seeds=seeds,
        raised_from=raised_from,
        chosen=before.chosen,
    )
