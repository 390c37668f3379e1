"""How long a step and a start of an arm take here, and by that a whole sweep."""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from gpt2.ablate.arms import Arm
from gpt2.ablate.jobs import Slot, train_all
from gpt2.ablate.runs import Run, check_unchanged, is_unchanged, make_measuring_run
from gpt2.ablate.sweep import Sweep
from gpt2.errors import UserError
from gpt2.telemetry.metrics import read_metrics, seconds_taken
from gpt2.utils import files
from gpt2.utils.terminal import wrap
from gpt2.utils.text import counted, format_duration

_MEASURED_STEPS = 40


@dataclasses.dataclass(frozen=True)
class Pace:
    """How long the runs of an arm take.

    Attributes:
        step: seconds of a training step.
        around: seconds of a run beside its steps, up to its last line of metrics: it starts,
            compiles, and validates once on a batch.
    """

    step: float
    around: float

    def seconds(self, run: Run | Arm) -> float:
        """Returns how long a run of the arm takes, but for its other validations and saves."""
        return self.around + run.config.train.num_steps * self.step


def measure(root: Path, arm: Arm, slot: Slot, equal: str) -> Pace:
    """Returns how long the runs of an arm take in a slot, by one that is trained once and kept.

    Args:
        root: workdir of the sweep.
        arm: of the sweep.
        slot: to train in.
        equal: `--equal` of the sweep.

    Raises:
        UserError: the arm's run fails, or another one was measured and lengths of runs rest on it.
    """
    run = make_measuring_run(root, arm.name, arm.config, _MEASURED_STEPS)
    with files.locked(run.folder.parent / f"{run.folder.name}.lock"):  # of an array's other jobs
        if equal == "seconds" and (root / "sweep.json").exists():
            check_unchanged([run])  # the lengths of runs rest on it
        elif not is_unchanged(run):
            shutil.rmtree(run.folder)
        if run.outcome().state != "finished":
            print(f"measuring a step of {arm.name}", flush=True)
        train_all([run], [slot], lambda training: None)
    outcome = run.outcome()
    if outcome.state != "finished":
        raise UserError(
            f"the arm {arm.name} cannot be measured ({outcome.error})",
            f"See {run.folder / 'log.txt'}",
        )
    records = read_metrics(run.workdir / "metrics.jsonl")
    steps = [r["perf/step_seconds"] for r in records if "perf/step_seconds" in r]
    step = median(steps[1:] or steps)
    whole = seconds_taken(run.workdir / "metrics.jsonl", _MEASURED_STEPS)
    return Pace(step, max(0.0, whole - _MEASURED_STEPS * step))


def describe_runs(sweep: Sweep, slots: Sequence[Slot]) -> str:
    """Returns the list of a sweep's runs and what they would take, by measured steps.

    Args:
        sweep: with the choices that have been made.
        slots: one for each run at a time.
    """
    runs, total, lines = [*sweep.choosing_runs(), *sweep.runs()], 0.0, []
    num_fixed = len(runs) if len(sweep.chosen) == len(sweep.arms) else len(sweep.choosing_runs())
    to_do = {
        run.folder
        for run in (*sweep.undecided_runs(), *sweep.runs())
        if run.outcome().state in ("waiting", "failed")
    }
    left = {run.arm for run in runs if run.folder in to_do}
    left |= {arm.name for arm in sweep.arms if arm.name not in sweep.chosen}
    paces = {
        arm.name: measure(sweep.root, arm, slots[0], sweep.equal)
        for arm in sweep.arms
        if arm.name in left
    }
    for i, run in enumerate(runs):
        took: str = run.outcome().state
        if run.folder in to_do:
            total += (seconds := paces[run.arm].seconds(run))
            took = format_duration(seconds)
        number = i if i < num_fixed else ""  # as for Sweep.numbered_run
        lines.append(f"{number:>4}  {run.label}  {run.config.train.num_steps} steps  {took}")
    later = [arm for arm in sweep.arms if arm.name not in sweep.chosen]
    if later:
        number = len(later) * sweep.num_seeds
        total += sum(sweep.num_seeds * paces[arm.name].seconds(arm) for arm in later)
        lines.append(f"then {counted(number, 'run')} with the values that these choose")
    if not paces:
        return "\n".join([*lines, "no run is left to train"])
    lines.append(
        wrap(
            f"about {format_duration(total / len(slots))} with --jobs={len(slots)}: steps, starts "
            f"and compilation, by a run of {_MEASURED_STEPS} steps of each arm, kept in "
            f"{sweep.root / 'measure'}. Validations and checkpoints come on top; programs from "
            "JAX's cache start sooner"
        )
    )
    return "\n".join(lines)
