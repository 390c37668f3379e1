"""The results of runs: final scores, metrics and validation curves."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from gpt2.config import DataConfig
from gpt2.errors import UserError
from gpt2.lab.experiments.run_folder import Run, describe
from gpt2.lab.experiments.terms import flops
from gpt2.telemetry.metrics import read_metrics
from gpt2.utils.code import SOURCE

Amount = Callable[[int], float]  # a function of the number of steps
AMOUNTS = {  # fields of a curve, with their titles in pictures and tables
    "tokens": "tokens",
    "flops": "FLOPs",
    "seconds": "seconds of training steps",
}
METRICS = ("train/", "eval/", "perf/")  # prefixes of the metrics in results.csv


class Curve(NamedTuple):
    """The validations of a run, oldest first: float64 arrays with a value for each validation."""

    tokens: np.ndarray  # number of tokens that training has read so far
    flops: np.ndarray  # training FLOPs so far, according to gpt2/model/flops.py
    # Time in training steps so far, excluding validation, checkpoints and compilation.
    seconds: np.ndarray
    scores: np.ndarray  # the compared metric


def read_results(runs: Sequence[Run], score: str) -> pd.DataFrame:
    """Return a table with a row for each run: its arm, seed, state, amounts, metrics and more.

    The file results.csv contains all columns except `run`, `curve` and `score`. `run` is the run's
    label, and `curve` is its `Curve`. `score` is the final value of the metric that the argument
    `score` names, or NaN for a run that has not finished. Raise a UserError if the folder of a run
    contains a different run.
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
        last = records[-1] if records else {}
        steps = last.get("step", 0)
        metrics = {key: last[key] for key in last if key.startswith(METRICS)}
        row = {
            "arm": run.arm,
            "purpose": "choose" if run.chooses else "compare",
            "values": describe(run.tuned),
            "seed": run.config.seed,
            "state": outcome.state,
            "code": " ".join(sorted(run.codes())),
            "steps": steps,
            "tokens": tokens(steps),
            "flops": flops_of(steps),
            "seconds": curve.seconds[-1] if len(curve.seconds) else math.nan,
            **metrics,
            "error": outcome.error,
            "folder": run.folder,
            "run": run.label,
            "curve": curve,
            "score": last[score] if outcome.state == "finished" else math.nan,
        }
        rows.append(row)
    return pd.DataFrame(rows)


def unknown(steps: int) -> float:
    """Return NaN, as the FLOPs of a run that was trained by another version of the code.

    Another version may count FLOPs differently.
    """
    return math.nan


def read_curve(workdir: Path, score: str, tokens: Amount, flops: Amount) -> Curve:
    """Read the validation curve of the metric `score` from a workdir.

    `tokens` and `flops` are functions that map a number of steps to the tokens or FLOPs of these
    steps.
    """
    points = []
    logged = [0]  # steps whose times are known
    seconds = [0.0]
    for record in read_metrics(workdir / "metrics.jsonl"):
        step = record["step"]
        if "perf/step_seconds" in record:
            passed = (step - logged[-1]) * record["perf/step_seconds"]
            seconds.append(seconds[-1] + passed)
            logged.append(step)
        value = record.get(score)
        if value is not None:
            points.append((tokens(step), flops(step), step, value))
    table = np.array(points, dtype=np.float64)
    columns = table.reshape(-1, 4).T
    columns[2] = np.interp(columns[2], logged, seconds)
    return Curve(*columns)


def check_comparable(runs: Sequence[Run], score: str, *, to_come: bool = False) -> None:
    """Raise a UserError if runs cannot be compared, or if a finished run lacks the metric `score`.

    Runs with the same options for data must have the same text, and runs with the same source
    folder must have the same code. The code of runs that have not ended is checked only with
    `to_come`: both the code that trained their checkpoints and the code that would train them now.
    """
    # For each corpus and for each source folder, a fingerprint and the first run that has it.
    texts: dict[DataConfig, tuple[bytes, Run]] = {}
    codes: dict[Path, tuple[str, Run]] = {}
    for run in runs:
        run.read(score)
        for code in sorted(run.codes(to_come=to_come)):
            old, first = codes.setdefault(run.source, (code, run))
            if old != code:
                raise UserError(
                    f"Runs of different code cannot be compared: {first.label} has the code {old},"
                    f" but {run.label} has the code {code}",
                    f"Restore the code {old} and repeat the command, or remove {first.folder}, so"
                    " that this run is trained again",
                )
        path = run.workdir / "data.json"
        if not path.exists():
            continue
        data = path.read_bytes()
        # The sizes of a ladder read the same text in batches of different sizes.
        options = dataclasses.replace(run.config.data, batch_size=1)
        text, first = texts.setdefault(options, (data, run))
        if text != data:
            raise UserError(
                f"The run in {run.folder} was trained on a different text from the run in"
                f" {first.folder}",
                "Remove the folder of the run whose text is wrong, and make sure that data.corpus "
                "contains the right text. Then repeat the command, which trains the run again",
            )
