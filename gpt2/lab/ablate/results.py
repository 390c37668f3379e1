"""What the runs of a sweep gave: final scores, curves, and results.csv."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from gpt2.lab.ablate.runs import Run, describe
from gpt2.lab.ablate.terms import flops
from gpt2.telemetry.metrics import read_metrics
from gpt2.utils.code import SOURCE

Amount = Callable[[int], float]  # of so many steps
AMOUNTS = {  # of a curve, by their names in pictures and tables
    "tokens": "tokens",
    "flops": "FLOPs",
    "seconds": "seconds of training steps",
}
METRICS = (
    "train/",
    "eval/",
    "perf/",
)  # what the names of metrics in results begin with


class Curve(NamedTuple):
    """The validations of a run, oldest first; arrays `[number of validations]`, float64."""

    tokens: np.ndarray  # read by training so far
    flops: np.ndarray  # spent so far, by the model's formula
    # Of training steps, without validation, checkpoints and compilation.
    seconds: np.ndarray
    scores: np.ndarray  # the metric in which runs are compared


def read_results(runs: Sequence[Run], score: str) -> pd.DataFrame:
    """Returns a row for each run: what results.csv tells of it, its curve, and its score.

    The score, the metric in which runs are compared, is nan for a run that has not finished. A run
    whose folder holds other than it is a UserError.
    """
    rows = []
    for run in runs:
        records = run.read(score)
        outcome = run.outcome()
        tokens = run.config.shapes.tokens
        flops_of: Amount = partial(flops, run.config)
        if run.source != SOURCE:
            flops_of = unknown
        curve = read_curve(run.workdir, score, tokens, flops_of)
        seconds = math.nan
        if len(curve.seconds):
            seconds = curve.seconds[-1]
        last = records[-1] if records else {}
        own = {}
        for name, value in last.items():
            if name.startswith(METRICS):
                own[name] = value
        final = math.nan
        if outcome.state == "finished":
            final = last[score]
        steps = last.get("step", 0)
        rows.append(
            {
                "arm": run.arm,
                "purpose": "choose" if run.chooses else "compare",
                "values": describe(run.tuned),
                "seed": run.config.seed,
                "state": outcome.state,
                "code": " ".join(sorted(run.codes())),
                "parameters": run.parameters(),
                "steps": steps,
                "tokens": tokens(steps),
                "flops": flops_of(steps),
                "seconds": seconds,
                **own,
                "error": outcome.error,
                "folder": run.folder,
                "run": run.label,
                "curve": curve,
                "score": final,
            }
        )
    return pd.DataFrame(rows)


def unknown(steps: int) -> float:
    """Returns the FLOPs of other code, whose formula is not ours."""
    return math.nan


def read_curve(workdir: Path, score: str, tokens: Amount, flops: Amount) -> Curve:
    """Reads the validations of a workdir, by the tokens and the FLOPs of so many steps."""
    points = []
    seconds = 0.0
    before = 0
    for record in read_metrics(workdir / "metrics.jsonl"):
        step = record["step"]
        if "perf/step_seconds" in record:
            seconds = seconds + (step - before) * record["perf/step_seconds"]
            before = step
        value = record.get(score)
        if value is not None:
            points.append((tokens(step), flops(step), seconds, value))
    table = np.array(points, dtype=np.float64)
    columns = table.reshape(-1, 4).T
    return Curve(*columns)


def amount_to_reach(amounts: np.ndarray, scores: np.ndarray, target: float) -> float:
    """Returns the amount after which a curve stays below a score, in lines between points.

    It is inf if the curve ends above, and the first validation's if all are below.
    """
    # The last that is above counts: no lucky validation before it.
    above = np.flatnonzero(scores > target)
    start = above[-1] if above.size else 0
    x = -scores[start : start + 2]
    y = amounts[start : start + 2]
    return float(np.interp(-target, x, y, right=math.inf))
