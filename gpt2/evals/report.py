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

    def scaled(self, factor: float) -> "Estimate":
        """Returns the number in another unit."""
        value, stderr, n = self
        return Estimate(factor * value, factor * stderr, n)

    def exp(self) -> "Estimate":
        """Returns the perplexity of a loss, with an error by the slope of exp."""
        value = math.exp(min(self.value, 700.0))
        return Estimate(value, value * self.stderr, self.num_examples)


Numbers = Sequence[float] | np.ndarray


def mean(values: Numbers) -> Estimate:
    """Returns the mean of values, one an example."""
    return ratio(values, np.ones(len(values)))


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


def mean_loss(scores: Sequence[Score], units: int | None = None) -> Estimate:
    """Returns the loss in nats per scored token, or per unit of a text of so many `units`.

    Units are shared out by tokens, since windows of a text do not end where words do.
    """
    losses = [-score.log_prob for score in scores]
    counts = np.array([score.count for score in scores], np.float64)
    if units is not None:
        counts *= units / counts.sum()
    return ratio(losses, counts)


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
