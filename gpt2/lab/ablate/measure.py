"""Short runs that show how long a step takes, and equal terms and a sweep's time by them."""

import contextlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from gpt2.config import DEFAULTS, with_options
from gpt2.errors import UserError
from gpt2.lab.ablate.arms import Arm
from gpt2.lab.ablate.jobs import Slot, train_all
from gpt2.lab.ablate.runs import ENDED, Run
from gpt2.lab.ablate.sweep import Sweep
from gpt2.lab.ablate.terms import LOSS, flops, with_length
from gpt2.telemetry.metrics import read_metrics
from gpt2.utils.code import hash_code
from gpt2.utils.text import format_duration

_STEPS = 40


def make_measuring_run(root: Path, arm: Arm) -> Run:
    """Returns a short run that only shows how long a step takes.

    What decides that time names its folder, in a sweep of the directory `root`.
    """
    options = {
        "train.num_steps": _STEPS,
        "train.log_every": _STEPS // 4,
        "train.eval_every": 0,
        "train.eval_batches": 1,
        # Another schedule takes as long, and may not fit into so few steps. A run is not measured
        # again where it becomes longer; nor does it diverge, as a slow warm-up makes sure.
        "optim.schedule": "constant",
        "optim.decay_fraction": DEFAULTS.optim.decay_fraction,
        "optim.warmup_steps": _STEPS,
    }
    config = with_options(arm.config, options)
    source = arm.source(root)
    decides = [config.to_dict(), arm.extra, hash_code(source)]
    mark = zlib.crc32(json.dumps(decides).encode())
    folder = root / "measure" / f"{arm.name}-{mark:08x}"
    return Run(arm.name, config, folder, source=source, extra=arm.extra)


def measure(root: Path, arm: Arm, slots: Sequence[Slot]) -> tuple[float, float]:
    """Returns the seconds of an arm's step, and of a run's start and compilation.

    They are those of a short run, which is trained once and kept.
    """
    run = make_measuring_run(root, arm)
    print(f"measuring {arm.name}", flush=True)
    with contextlib.redirect_stdout(None):  # a score of so few steps is no result
        train_all([[run]], slots[:1], LOSS)
    if run.outcome().state != "finished":
        raise UserError(
            f"{arm.name} cannot be measured", f"See {run.folder / 'log.txt'}"
        )
    records = pd.DataFrame(read_metrics(run.workdir / "metrics.jsonl"))
    steps = records["perf/step_seconds"].dropna()
    step = float(steps[1:].median())  # the first compiles
    whole = float(records["perf/total_seconds"].max())
    return step, whole - _STEPS * step


def equalize(
    arms: Sequence[Arm],
    terms: str,
    root: Path,
    slots: Sequence[Slot],
) -> list[Arm]:
    """Returns the arms with as many tokens, FLOPs or seconds as the first, by their steps."""
    first, *others = arms

    def cost(arm: Arm) -> float:  # of a step, the mean over the run
        steps = arm.config.train.num_steps
        if terms == "tokens":
            return arm.config.shapes.tokens(steps) / steps
        if terms == "seconds":
            step, _ = measure(root, arm, slots)
            return step
        if arm.commit != first.commit:
            raise UserError(
                f"the FLOPs of {arm.name}, of other code, are not known",
                "Use --equal=tokens or --equal=seconds",
            )
        return flops(arm.config, steps) / steps

    budget = first.config.train.num_steps * cost(first)
    equal = [first]
    for arm in others:
        num_steps = round(budget / cost(arm))
        equal.append(with_length(arm, num_steps))
    return equal


def describe_runs(sweep: Sweep, slots: Sequence[Slot]) -> str:
    """Returns the list of a sweep's runs and what they would take apart, by measured steps."""
    seconds = {}
    for arm in sweep.arms:
        step, start = measure(sweep.root, arm, slots)
        print(f"{arm.name}: {step:.4g} seconds a step", flush=True)
        seconds[arm.name] = start + arm.config.train.num_steps * step
    lines = ["would train"]
    total = 0.0
    # Of values that are still to be chosen, any take as long.
    chosen = {name: sweep.chosen.get(name, {}) for name in seconds}
    sweep = replace(sweep, chosen=chosen)
    for run in sweep.all_runs():
        if run.outcome().state not in ENDED:
            total += seconds[run.arm]
            told = format_duration(seconds[run.arm])
            lines.append(f"{run.label}  {run.config.train.num_steps} steps  {told}")
    whole = format_duration(total / len(slots))
    lines.append(f"about {whole} by runs apart, without validations and checkpoints")
    return "\n".join(lines)
