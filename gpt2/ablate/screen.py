"""What the person at the terminal sees: runs that end, runs that train, and what a sweep takes."""

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

from rich.progress import Progress, TaskID

from gpt2.ablate.arms import Arm
from gpt2.ablate.jobs import Slot, has_ended, train_all
from gpt2.ablate.results import read_results
from gpt2.ablate.runs import Run, make_measuring_run
from gpt2.ablate.sweep import Sweep
from gpt2.config import Config
from gpt2.errors import refuse
from gpt2.telemetry.metrics import read_metrics
from gpt2.utils import files
from gpt2.utils.text import format_duration, on_terminal

_MEASURED_STEPS = 40
_END_BYTES = 4096  # of metrics.jsonl, which hold its last lines
_SPEED_SECONDS = 600  # over which the time left is estimated


@contextlib.contextmanager
def shown(sweep: Sweep, runs: Sequence[Run], title: str) -> Iterator[Callable]:
    """Yields what to call with the runs that train: it prints a line for each that has ended.

    On a terminal, bars show how far the others are.
    """
    told = {run.folder for run in runs if has_ended(run)}
    bars: dict[Path, TaskID] = {}

    def show(training: Sequence[Run]) -> None:
        for run in runs:
            if run.folder in told or not has_ended(run):
                continue
            outcome = run.outcome()
            told.add(run.folder)
            what = f"{outcome.state}: {outcome.error}"
            if outcome.state == "finished":
                what = f"{read_results([run], sweep.score).score[0]:.4f} {sweep.unit}"
            line = f"{len(told)}/{len(runs)}  {run.label}  {what}"
            progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        progress.update(everything, completed=len(told))
        for folder in bars.keys() - {run.folder for run in training}:
            progress.remove_task(bars.pop(folder))
        for run in training:
            if run.folder not in bars:
                bars[run.folder] = progress.add_task(run.label, total=run.config.train.num_steps)
            progress.update(bars[run.folder], completed=_steps(run))

    with Progress(disable=not on_terminal(), speed_estimate_period=_SPEED_SECONDS) as progress:
        everything = progress.add_task(title, total=len(runs))
        yield show


def _steps(run: Run) -> int:
    """Returns the last step that a run has logged; reads the end of its file only."""
    path = run.workdir / "metrics.jsonl"
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _END_BYTES))
        *_, steps = [b"0", *re.findall(rb'^{"step": (\d+)', file.read(), re.MULTILINE)]
    return int(steps)


def measure(root: Path, arm: Arm, slot: Slot) -> tuple[float, float]:
    """Returns the seconds of an arm's step, and of a run's start, compilation and short validation.

    They are those of a short run, which is trained once and kept.
    """
    run = make_measuring_run(root, arm.name, arm.config, _MEASURED_STEPS)
    with files.locked(run.folder.parent / f"{run.folder.name}.lock"):
        if run.outcome().state != "finished":
            shutil.rmtree(run.folder, ignore_errors=True)
            print(f"measuring a step of {arm.name}", flush=True)
            train_all([run], [slot])
    failed, error = run.outcome().state != "finished", run.outcome().error
    refuse(failed, f"{arm.name} cannot be measured ({error})", f"See {run.folder}/log.txt")
    records = read_metrics(run.workdir / "metrics.jsonl")
    steps = [r["perf/step_seconds"] for r in records if "perf/step_seconds" in r]
    step = median(steps[1:] or steps)
    whole = max(r.get("perf/total_seconds", 0.0) for r in records)
    return step, max(0.0, whole - _MEASURED_STEPS * step)


def describe_runs(sweep: Sweep, slots: Sequence[Slot]) -> str:
    """Returns the list of a sweep's runs and what they would take, by measured steps."""
    paces: dict[str, tuple[float, float]] = {}
    arms, total, lines = {arm.name: arm for arm in sweep.arms}, 0.0, []

    def seconds(name: str, config: Config) -> float:
        if name not in paces:
            paces[name] = measure(sweep.root, arms[name], slots[0])
        step, around = paces[name]
        return around + config.train.num_steps * step

    for run in (*sweep.choosing_runs(), *sweep.runs()):
        took = run.outcome().state
        if took in ("waiting", "failed") and not (run.chooses and run.arm in sweep.chosen):
            total += (needed := seconds(run.arm, run.config))
            took = format_duration(needed)
        lines.append(f"{run.label}  {run.config.train.num_steps} steps  {took}")
    for arm in sweep.undecided:
        total += sweep.num_seeds * seconds(arm.name, arm.config)
        lines.append(f"then {sweep.num_seeds} seeds of {arm.name} with the values it chooses")
    if not paces:
        return "\n".join([*lines, "no run is left to train"])
    lines.append(
        f"about {format_duration(total / len(slots))} with --jobs={len(slots)}: steps, starts and "
        f"compilation, by a run of {_MEASURED_STEPS} steps of each arm, kept in "
        f"{sweep.root / 'measure'}; validations and checkpoints come on top"
    )
    return "\n".join(lines)
