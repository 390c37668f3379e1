"""What the runs of a sweep gave: final scores, curves, and results.csv."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from gpt2.ablate.runs import Outcome, Run, describe
from gpt2.ablate.terms import step_flops
from gpt2.config import load_config
from gpt2.errors import UserError
from gpt2.telemetry.metrics import read_metrics
from gpt2.utils.files import write_text

_METRICS = ("eval/loss", "eval/bits_per_byte", "train/loss")  # in results.csv


@dataclasses.dataclass(frozen=True)
class Curve:
    """The validations of a run, oldest first; arrays `[number of validations]`, float64."""

    tokens: np.ndarray  # read by training so far
    flops: np.ndarray  # spent so far, by the model's formula
    seconds: np.ndarray  # of training steps, without validation, checkpoints and compilation
    scores: np.ndarray  # the metric in which runs are compared


def read_results(runs: Sequence[Run], score: str) -> pd.DataFrame:
    """Returns a row for each run: what results.csv tells of it, its score and its curve.

    The score, the metric in which runs are compared, is nan for a run that has not finished.
    """
    rows = []
    for run in runs:
        outcome, curve = run.outcome(), read_curve(run.workdir, score)
        last = (read_metrics(run.workdir / "metrics.jsonl") or [{}])[-1]
        if outcome.state == "finished" and last.get(score) is None:
            outcome = Outcome("failed", f"its last {score} is gone from metrics.jsonl")
        row = {
            "arm": run.arm,
            "purpose": "choose" if run.chooses else "compare",
            "values": describe(run.tuned),
            "seed": run.config.seed,
            "state": outcome.state,
            "steps": last.get("step", 0),
            "tokens": last.get("step", 0) * run.config.tokens_per_step,
            "flops": curve.flops[-1] if len(curve.flops) else math.nan,
        }
        row |= {name: last.get(name) for name in _METRICS}
        row |= {"error": outcome.error, "folder": run.folder, "run": run.label, "curve": curve}
        # The only column of results.csv that two runs of one command may differ in.
        row["seconds"] = curve.seconds[-1] if len(curve.seconds) else math.nan
        row["score"] = last[score] if outcome.state == "finished" else math.nan
        rows.append(row)
    return pd.DataFrame(rows)


def write_csv(path: Path, results: pd.DataFrame) -> None:
    """Writes results.csv, a row for each run."""
    table = results.drop(columns=["run", "curve", "score"])
    table["folder"] = [folder.relative_to(path.parent) for folder in table["folder"]]
    for column, form in (("flops", "{:.0f}"), ("seconds", "{:.2f}")):
        table[column] = table[column].map(form.format, na_action="ignore")
    write_text(path, table.to_csv(index=False))


def read_curve(workdir: Path, score: str) -> Curve:
    """Reads the validations of a workdir of train.py, which may lack any file.

    Validations without a finite score are skipped.
    """
    try:
        config = load_config(workdir)
        flops_per_step = step_flops(config)
    except UserError:  # it has not come as far
        return Curve(*(np.zeros(0) for _ in range(4)))
    points, seconds, before = [], 0.0, 0
    for record in read_metrics(workdir / "metrics.jsonl"):
        step = record["step"]
        if "perf/step_seconds" in record:
            seconds, before = seconds + (step - before) * record["perf/step_seconds"], step
        if record.get(score) is not None:
            tokens, flops = step * config.tokens_per_step, step * flops_per_step
            points.append((tokens, flops, seconds, record[score]))
    return Curve(*np.array(points, dtype=np.float64).reshape(-1, 4).T)


def read_reference(path: Path) -> dict[str, list[Curve]]:
    """Reads published points, a CSV file of `tokens,loss`: by its column `name`, a curve each."""
    try:
        table = pd.read_csv(path)
        points = table[["tokens", "loss"]].astype(float)
        if table.empty or not np.isfinite(points).all(axis=None):
            raise ValueError("a number is missing")
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{path} is not a table of points ({error})",
            "Begin it with the line tokens,loss and give two numbers in each line below",
        ) from None
    names = table.get("name", pd.Series(path.stem, index=table.index)).fillna(path.stem)
    curves = {}
    for name, group in points.groupby(names, sort=False):
        rows = group.sort_values("tokens")
        unknown = np.full(len(rows), np.nan)
        curves[str(name)] = [Curve(rows.tokens.to_numpy(), unknown, unknown, rows.loss.to_numpy())]
    return curves


def amount_to_reach(amounts: np.ndarray, scores: np.ndarray, target: float) -> float:
    """Returns the amount at which a curve first comes down to a score.

    Between two validations, the curve is a straight line. It is inf if the curve never comes down,
    and nan if the first validation is there already.
    """
    if (i := _first_below(scores, target)) is None:
        return math.inf
    if i == 0:  # when it came down is not known
        return math.nan
    share = (scores[i - 1] - target) / (scores[i - 1] - scores[i])
    return float(amounts[i - 1] + share * (amounts[i] - amounts[i - 1]))


def log_amount_per_score(amounts: np.ndarray, scores: np.ndarray, target: float) -> float:
    """Returns by how much the logarithm of `amount_to_reach` rises if the target is lower by 1."""
    if not (i := _first_below(scores, target)):
        return math.nan
    per_score = (amounts[i] - amounts[i - 1]) / (scores[i - 1] - scores[i])
    return float(per_score / amount_to_reach(amounts, scores, target))


def _first_below(scores: np.ndarray, target: float) -> int | None:
    below = np.flatnonzero(scores <= target)
    return int(below[0]) if len(below) else None
