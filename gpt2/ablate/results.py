"""What the runs of a sweep gave: final scores, curves, and results.csv."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from gpt2.ablate.runs import Outcome, Run, describe
from gpt2.ablate.terms import LOSS, flops
from gpt2.telemetry.metrics import read_metrics
from gpt2.utils.files import write_text

Amount = Callable[[int], float]  # of so many steps


@dataclasses.dataclass(frozen=True)
class Curve:
    """The validations of a run, oldest first; arrays `[number of validations]`, float64."""

    tokens: np.ndarray  # read by training so far
    flops: np.ndarray  # spent so far, by the model's formula
    seconds: (
        np.ndarray
    )  # of training steps, without validation, checkpoints and compilation
    scores: np.ndarray  # the metric in which runs are compared
    training: "Curve | None" = (
        None  # the training loss, beside a single validation in its unit
    )


def read_results(runs: Sequence[Run], score: str) -> pd.DataFrame:
    """Returns a row for each run: what results.csv tells of it, its curve, and its score.

    The score, the metric in which runs are compared, is nan for a run that has not finished.
    """
    rows = []
    for run in runs:
        outcome = run.outcome()
        amounts = (run.config.shapes.tokens, partial(flops, run.config))
        curve = read_curve(run.workdir, score, *amounts)
        last = (read_metrics(run.workdir / "metrics.jsonl") or [{}])[-1]
        if outcome.state == "finished" and last.get(score) is None:
            outcome = Outcome("failed", f"its last {score} is gone from metrics.jsonl")
        row = {
            "arm": run.arm,
            "purpose": "choose" if run.chooses else "compare",
            "values": describe(run.tuned),
            "seed": run.config.seed,
            "state": outcome.state,
            "code": " ".join(sorted(run.codes())),
            "taken_from": outcome.taken_from,
            "steps": last.get("step", 0),
            "tokens": run.config.shapes.tokens(last.get("step", 0)),
            "flops": curve.flops[-1] if len(curve.flops) else math.nan,
        }
        row |= {
            name: last.get(name)
            for name in ("eval/loss", "eval/bits_per_byte", "train/loss")
        }
        row |= {
            "error": outcome.error,
            "folder": run.folder,
            "run": run.label,
            "curve": curve,
        }
        row["seconds"] = curve.seconds[-1] if len(curve.seconds) else math.nan
        rows.append(
            row | {"score": last[score] if outcome.state == "finished" else math.nan}
        )
    return pd.DataFrame(rows)


def write_csv(path: Path, results: pd.DataFrame) -> None:
    """Writes results.csv, a row for each run."""
    table = results.drop(columns=["run", "curve", "score"])
    table["folder"] = [folder.relative_to(path.parent) for folder in table["folder"]]
    write_text(path, table.round({"flops": 0, "seconds": 2}).to_csv(index=False))


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
        if record.get(score) is not None:
            points.append((tokens(step), flops(step), seconds, record[score]))
    curve = Curve(*np.array(points, dtype=np.float64).reshape(-1, 4).T)
    if len(points) == 1 and score == LOSS:
        training = read_curve(workdir, "train/loss", tokens, flops)
        return dataclasses.replace(curve, training=training)
    return curve


def amount_to_reach(amounts: np.ndarray, scores: np.ndarray, target: float) -> float:
    """Returns the amount after which a curve stays below a score, in lines between points.

    It is inf if the curve ends above, and the first validation's if all are below.
    """
    above = np.flatnonzero(
        scores > target
    )  # the last counts: no lucky validation before it
    start = above[-1] if above.size else 0
    return float(
        np.interp(-target, -scores[start:][:2], amounts[start:][:2], right=math.inf)
    )
