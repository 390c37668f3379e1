"""Short runs that show how long a step takes, and what a sweep would take by them."""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from gpt2.ablate.arms import Arm
from gpt2.ablate.jobs import Slot, train_all
from gpt2.ablate.runs import Run
from gpt2.ablate.sweep import Sweep
from gpt2.ablate.terms import LOSS
from gpt2.config import DEFAULTS, with_options
from gpt2.errors import UserError
from gpt2.telemetry.metrics import read_metrics
from gpt2.training.code import hash_code
from gpt2.utils import files
from gpt2.utils.text import format_duration

_STEPS = 40


def make_measuring_run(root: Path, arm: Arm) -> Run:
    """Returns a short run that only shows how long a step takes."""
    options = {
        "train.num_steps": _STEPS,
        "train.eval_every": 0,
        "train.eval_batches": 1,
        "train.checkpoint_every": 0,
        "train.keep_every": 0,
        "train.keep_checkpoints": DEFAULTS.train.keep_checkpoints,
        "logging.profile_start": 0,
        "logging.profile_steps": 0,
        # Another schedule takes as long, and may not fit into so few steps.
        "optim.schedule": "constant",
        "optim.end_learning_rate": arm.config.optim.learning_rate,
        "optim.warmup_steps": 0,
        "optim.warmup_percent": 0.0,
        "optim.decay_steps": 0,
        "optim.decay_percent": 0.0,
    }
    config = with_options(arm.config, options)
    source = arm.source(root)
    decides = [config.to_dict(), arm.extra, hash_code(source)]  # the time
    mark = zlib.crc32(json.dumps(decides).encode())
    folder = root / "measure" / f"{arm.name}-{mark:08x}"
    return Run(arm.name, config, folder, source=source, extra=arm.extra)


def measure(root: Path, arm: Arm, slot: Slot) -> tuple[float, float]:
    """Returns the seconds of an arm's step, and of a run's start and compilation.

    They are those of a short run, which is trained once and kept.
    """
    run = make_measuring_run(root, arm)
    with files.locked(run.folder.parent / f"{run.folder.name}.lock"):
        train_all([run], [slot], LOSS)
    outcome = run.outcome()
    if outcome.state != "finished":
        raise UserError(
            f"{arm.name} cannot be measured ({outcome.error})",
            f"See {run.folder}/log.txt",
        )
    run.check(LOSS)
    records = read_metrics(run.workdir / "metrics.jsonl")
    steps = [r["perf/step_seconds"] for r in records if "perf/step_seconds" in r]
    step = median(steps[1:] or steps)
    whole = max(r.get("perf/total_seconds", 0.0) for r in records)
    return step, max(0.0, whole - _STEPS * step)


def describe_runs(sweep: Sweep, slots: Sequence[Slot]) -> str:
    """Returns the list of a sweep's runs and what they would take, by measured steps."""
    seconds = {}
    lines = []
    total = 0.0
    for arm in sweep.arms:
        step, around = measure(sweep.root, arm, slots[0])
        seconds[arm.name] = around + arm.config.train.num_steps * step
    for run in sweep.needed_runs():
        state = run.outcome().state
        if state in ("waiting", "failed"):
            total += seconds[run.arm]
            state = format_duration(seconds[run.arm])
        lines.append(f"{run.label}  {run.config.train.num_steps} steps  {state}")
    seeds = sweep.looks[0]
    for name in seconds.keys() - sweep.chosen.keys():
        total += seeds * seconds[name]
        lines.append(f"then {seeds} seeds of {name} with the values it chooses")
    whole = format_duration(total / len(slots))
    jobs = f"--jobs={len(slots)}"
    lines.append(f"about {whole} with {jobs}, beside validations and checkpoints")
    return "\n".join(lines)
