"""Short runs that show how long a step takes, and what a sweep would take by them."""

import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

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
    off = ["train.eval_every", "train.checkpoint_every", "train.keep_every"]
    off += ["logging.profile_start", "logging.profile_steps"]
    # Another schedule takes as long, and may not fit into so few steps.
    optim = {
        "schedule": "constant",
        "end_learning_rate": arm.config.optim.learning_rate,
    }
    optim |= dict(warmup_steps=0, decay_steps=0, warmup_percent=0.0, decay_percent=0.0)
    options: dict[str, Any] = {f"optim.{name}": value for name, value in optim.items()}
    options |= {"train.num_steps": _STEPS, "train.eval_batches": 1} | dict.fromkeys(
        off, 0
    )
    options |= {"train.keep_checkpoints": DEFAULTS.train.keep_checkpoints}
    config = with_options(arm.config, options)
    source = arm.source(root)
    decides = [config.to_dict(), hash_code(source)]  # the time
    mark = zlib.crc32(json.dumps(decides).encode())
    return Run(
        arm.name, config, root / "measure" / f"{arm.name}-{mark:08x}", source=source
    )


def measure(root: Path, arm: Arm, slot: Slot) -> tuple[float, float]:
    """Returns the seconds of an arm's step, and of a run's start and compilation.

    They are those of a short run, which is trained once and kept.
    """
    run = make_measuring_run(root, arm)
    with files.locked(run.folder.parent / f"{run.folder.name}.lock"):
        train_all([run], [slot], LOSS, math.inf)
    failed = run.outcome().state != "finished"
    error = run.outcome().error
    if failed:
        raise UserError(
            f"{arm.name} cannot be measured ({error})", f"See {run.folder}/log.txt"
        )
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
    for run in (*sweep.undecided_runs(), *sweep.runs()):
        state = run.outcome().state
        if state in ("waiting", "failed"):
            total += seconds[run.arm]
            state = format_duration(seconds[run.arm])
        lines.append(f"{run.label}  {run.config.train.num_steps} steps  {state}")
    for name in seconds.keys() - sweep.chosen.keys():
        total += sweep.looks[0] * seconds[name]
        lines.append(
            f"then {sweep.looks[0]} seeds of {name} with the values it chooses"
        )
    if len(sweep.looks) > 1 or (sweep.find and not sweep.seeds):
        lines.append("then the seeds that looks or --find add")
    whole = format_duration(total / len(slots))
    lines.append(
        f"about {whole} with --jobs={len(slots)}, beside validations and checkpoints"
    )
    return "\n".join(lines)
