"""What the runs of a sweep gave: final scores, curves, and results.csv."""

import csv
import dataclasses
import io
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.ablate.equal import step_flops
from gpt2.ablate.runs import Outcome, Run, describe
from gpt2.config import load_config
from gpt2.errors import UserError
from gpt2.telemetry.metrics import read_metrics
from gpt2.utils.files import write_text


@dataclasses.dataclass(frozen=True)
class Curve:
    """The validations of a run, oldest first; arrays `[number of validations]`, float64.

    Attributes:
        tokens: read by training so far.
        flops: spent so far, by the model's formula.
        seconds: of training steps so far, without validation, checkpoints and compilation.
        scores: the metric in which runs are compared.
    """

    tokens: np.ndarray
    flops: np.ndarray
    seconds: np.ndarray
    scores: np.ndarray


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run gave.

    Attributes:
        run: whose.
        state: see `gpt2.ablate.runs.Outcome`.
        error: why it has not finished, if it broke.
        steps: how many it trained.
        metrics: those of its last line of metrics; empty if there is none.
        curve: of its validations.
    """

    run: Run
    state: str
    error: str
    steps: int
    metrics: dict[str, Any]
    curve: Curve

    def score(self, name: str) -> float:
        """Returns a metric of the last validation of a run that has finished; else nan."""
        value = self.metrics.get(name) if self.state == "finished" else None
        return math.nan if value is None else value


def read_result(run: Run, score: str) -> Result:
    """Reads what a run has given so far.

    Args:
        run: of this sweep.
        score: the metric in which runs are compared.
    """
    outcome = run.outcome()
    records = read_metrics(run.workdir / "metrics.jsonl")
    if outcome.state == "finished" and (not records or records[-1].get(score) is None):
        outcome = Outcome("failed", f"its last {score} is gone from metrics.jsonl")
    return Result(
        run,
        outcome.state,
        outcome.error,
        records[-1]["step"] if records else 0,
        records[-1] if records else {},
        read_curve(run.workdir, score),
    )


def read_curve(workdir: Path, score: str) -> Curve:
    """Reads the validations of a workdir of train.py.

    Args:
        workdir: may lack any file.
        score: a metric of validations. Validations without a finite one are left out.
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
    """Reads published points: by name, a curve over tokens alone.

    Raises:
        UserError: the file cannot be read as `tokens,loss`, with or without `name`.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    try:
        with open(path, newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            if missing := {"tokens", "loss"}.difference(table.fieldnames or ()):
                raise ValueError(f"it has no column {' and no column '.join(sorted(missing))}")
            for row in table:
                point = float(row["tokens"]), float(row["loss"])
                if not all(map(math.isfinite, point)):
                    raise ValueError(f"{point} is not finite")
                points.setdefault(row.get("name") or path.stem, []).append(point)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})", "Check --reference") from None
    except (TypeError, ValueError, csv.Error) as error:
        raise UserError(
            f"{path} is not a table of points ({error})",
            "Begin it with the line tokens,loss and give two numbers in each line below",
        ) from None
    if not points:
        raise UserError(f"{path} holds no point", "Give two numbers in each line: tokens,loss")
    curves = {}
    for name, members in points.items():
        tokens, losses = np.array(sorted(members)).T
        unknown = np.full(len(tokens), np.nan)
        curves[name] = [Curve(tokens, unknown, unknown, losses)]
    return curves


def amount_to_reach(amounts: np.ndarray, scores: np.ndarray, target: float) -> float:
    """Returns the amount at which a curve first comes down to a score.

    It is inf if the curve never does, and nan if the first validation is there already.

    Args:
        amounts: tokens, FLOPs or seconds of each validation.
        scores: its score.
        target: between two validations, the curve is a straight line.
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


_COLUMNS = (
    *("arm", "purpose", "values", "seed", "state", "steps", "tokens", "flops"),
    *("eval/loss", "eval/bits_per_byte", "train/loss", "error", "folder"),
    "seconds",  # the only column that two runs of one command may differ in
)


def write_csv(path: Path, results: Iterable[Result], root: Path) -> None:
    """Writes results.csv, a row for each run."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    table.writeheader()
    for result in results:
        run, curve = result.run, result.curve
        table.writerow(
            {
                "arm": run.arm,
                "purpose": "choose" if run.chooses else "compare",
                "values": describe(run.tuned),
                "seed": run.seed,
                "state": result.state,
                "steps": result.steps,
                "tokens": result.steps * run.config.tokens_per_step,
                "flops": f"{curve.flops[-1]:.0f}" if len(curve.flops) else "",
                "error": result.error,
                "folder": run.folder.relative_to(root),
                "seconds": f"{curve.seconds[-1]:.2f}" if len(curve.seconds) else "",
            }
            | {
                name: result.metrics.get(name, "")
                for name in ("eval/loss", "eval/bits_per_byte", "train/loss")
            }
        )
    write_text(path, text.getvalue())
