"""The figures of an evaluation, each with its convention, as a table and as JSON."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from gpt2.evals.scoring import Score
from gpt2.utils import files


class Figure(NamedTuple):
    """A number, its standard error over examples, and how it was scored, in words."""

    task: str
    metric: str
    value: float
    stderr: float
    num_examples: int
    convention: str


class Estimate(NamedTuple):
    """A number over examples, and its standard error."""

    value: float
    stderr: float  # NaN of a single example
    num_examples: int


def mean(values: Sequence[float]) -> Estimate:
    """Returns the mean of values, one an example."""
    return ratio(values, np.ones(len(values)))


Numbers = Sequence[float] | np.ndarray


def ratio(numerators: Numbers, denominators: Numbers) -> Estimate:
    """Returns sum / sum over examples.

    Its error is that of a ratio estimator (Cochran 1977, section 2.11). It treats examples as
    independent, and the parts of one example as dependent.
    """
    x = np.asarray(numerators, np.float64)
    y = np.asarray(denominators, np.float64)
    n = len(x)
    value = float(x.sum() / y.sum())
    if n < 2:
        return Estimate(value, math.nan, n)
    residuals = np.linalg.norm(x - value * y) / y.sum()
    stderr = math.sqrt(n / (n - 1)) * residuals
    return Estimate(value, float(stderr), n)


def perplexity(scores: Sequence[Score], units: Numbers | None = None) -> Estimate:
    """Returns exp(loss per unit), with a standard error by the slope of exp.

    `units` says how many units each example counts; its scored tokens if not given.
    """
    if units is None:
        units = [score.count for score in scores]
    losses = [-score.log_prob for score in scores]
    loss, stderr, n = ratio(losses, units)
    value = math.exp(min(loss, 700.0))
    return Estimate(value, value * stderr, n)


def print_table(figures: Sequence[Figure]) -> None:
    """Prints the figures, and under them how each was scored."""
    table = Table("task", "metric", "value", "± stderr", "examples")
    for figure in figures:
        table.add_row(
            figure.task,
            figure.metric,
            f"{figure.value:.6g}",
            "unknown" if math.isnan(figure.stderr) else f"{figure.stderr:.2g}",
            f"{figure.num_examples:,}",
        )
    console = Console(markup=False, highlight=False)
    console.print(table)
    for line in dict.fromkeys(f"{each.task}: {each.convention}" for each in figures):
        console.print(line)


def write_json(figures: Sequence[Figure], path: Path) -> None:
    """Writes the figures as a JSON list of objects, with null for an error that is not known."""
    rows = [figure._asdict() for figure in figures]
    for row in rows:
        if math.isnan(row["stderr"]):
            row["stderr"] = None
    files.write_json(path, rows)
