"""Measure the time of a step with short runs, and choose each arm's number of steps.

The numbers are chosen so that a run of each arm costs as much as a run of the baseline. The cost is
counted in tokens, FLOPs or seconds.
"""

import contextlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from gpt2.config import DEFAULTS, with_options
from gpt2.errors import UserError
from gpt2.lab.experiments.arms import Arm
from gpt2.lab.experiments.jobs import Slot, train_all
from gpt2.lab.experiments.run_folder import Run
from gpt2.lab.experiments.terms import flops, with_length
from gpt2.telemetry.metrics import read_metrics
from gpt2.utils.code import hash_code

_STEPS = 40


def make_measuring_run(root: Path, arm: Arm) -> Run:
    """Return the short run that measures the time of an arm's step.

    The run has the arm's largest shape in every step. The name of the run's folder is a hash of its
    options and code, so that a change of these leads to a new measurement.
    """
    options = {
        "train.num_steps": _STEPS,
        "train.log_every": _STEPS // 4,
        "train.eval_every": 0,
        "train.eval_batches": 1,
        # The schedule does not affect the time of a step. A constant schedule works with few steps,
        # and a slow warm-up prevents the run from diverging. These options do not depend on the
        # arm's number of steps, so the folder does not change if this number does.
        "optim.schedule": "constant",
        "optim.decay_fraction": DEFAULTS.optim.decay_fraction,
        "optim.warmup_steps": _STEPS,
    }
    largest = arm.config.shapes.largest
    options["model.context_length"] = largest.context_length
    config = with_options(arm.config.at(largest), options)
    source = arm.source(root)
    facts = [config.to_dict(), arm.extra, hash_code(source)]
    crc = zlib.crc32(json.dumps(facts).encode())
    # Not the arm's name: a repeated idea of a ledger gets another number, but is the same idea.
    folder = root / "measure" / f"{crc:08x}"
    return Run(arm.name, config, folder, source=source, extra=arm.extra)


def measure(root: Path, arm: Arm, slots: Sequence[Slot]) -> tuple[float, float]:
    """Return the seconds of an arm's step, and the seconds of a run's start-up and compilation.

    If the arm's steps have different numbers of tokens, the first result is for their mean number.

    `slots` are the resources of simultaneous runs. A short run in the first slot measures both
    times. The run is stored in `root`, the folder of the sweep or ledger, and is not repeated.
    """
    run = make_measuring_run(root, arm)
    print(f"measuring the steps of {arm.name}, in {root}", flush=True)
    # Users need no log line about the end of this short run.
    with contextlib.redirect_stdout(None):
        train_all([run], slots[:1])
    if run.outcome().state != "finished":
        raise UserError(
            f"The short run that measures {arm.name} failed",
            f"See {run.folder / 'log.txt'}",
        )
    records = pd.DataFrame(read_metrics(run.workdir / "metrics.jsonl"))
    steps = records["perf/step_seconds"].dropna()
    # The first log line has the time of the first step alone, which is slower than other steps.
    step = float(steps[1:].median())
    # The first log line counts, because a process that continues an interrupted run measures only
    # its own seconds.
    first = records.dropna(subset="perf/total_seconds").iloc[0]
    start = float(first["perf/total_seconds"] - first.step * step)
    num_steps = arm.config.train.num_steps
    mean_tokens = arm.config.shapes.tokens(num_steps) / num_steps
    fraction = mean_tokens / arm.config.shapes.largest.tokens
    return fraction * step, start


class Times(NamedTuple):
    """The durations that determine how long the runs of an arm take, in seconds."""

    step: float
    start: float  # start-up and compilation
    is_measured: bool = True


def forecast(
    arms: Sequence[Arm],
    root: Path,
    slots: Sequence[Slot],
    smallest: Mapping[str, Times],
) -> Iterator[tuple[str, Times]]:
    """Yield the name of each arm at one size, with the times of its start-up and of a step.

    The first arm is the baseline. At the larger sizes of a ladder, `smallest` contains the times at
    the smallest size. Only the baseline is then measured. The times of another arm are the
    baseline's times, multiplied by the ratio of the arm's to the baseline's times at the smallest
    size. At the smallest size, and for a sweep, `smallest` is empty, and all arms are measured.
    Times that are stored in `root` are not measured again.
    """
    baseline, *others = arms
    usual = Times(*measure(root, baseline, slots))
    yield baseline.name, usual
    for arm in others:
        is_stored = make_measuring_run(root, arm).outcome().state == "finished"
        if is_stored or not smallest:
            yield arm.name, Times(*measure(root, arm, slots))
            continue
        small = smallest[arm.name]
        small_baseline = smallest[baseline.name]
        step = usual.step * small.step / small_baseline.step
        start = usual.start * small.start / small_baseline.start
        yield arm.name, Times(step, start, is_measured=False)


def equalize(
    arms: Sequence[Arm],
    terms: str,
    root: Path,
    slots: Sequence[Slot],
) -> list[Arm]:
    """Return the arms, each with the number of steps that costs as much as the first arm's run.

    `terms` states how the cost is counted: in `tokens`, `flops` or `seconds`. The first arm does
    not change. If seconds count, short runs measure the time of a step. They use the first of
    `slots`, the resources of simultaneous runs; see `measure`.
    """
    first, *others = arms

    def cost(arm: Arm) -> float:
        """Return the mean cost of a step over the run, in the unit of `terms`."""
        steps = arm.config.train.num_steps
        if terms == "tokens":
            return arm.config.shapes.tokens(steps) / steps
        if terms == "seconds":
            step, _ = measure(root, arm, slots)
            return step
        if arm.commit != first.commit:
            raise UserError(
                f"The FLOPs of {arm.name} are unknown, because this arm runs another version of "
                "the code",
                "Use --equal=tokens or --equal=seconds",
            )
        return flops(arm.config, steps) / steps

    budget = first.config.train.num_steps * cost(first)
    equal = [first]
    for arm in others:
        num_steps = round(budget / cost(arm))
        equal.append(with_length(arm, num_steps))
    return equal
