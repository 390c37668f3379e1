"""Scores of an evaluation, with a description of how each was computed, as a table and as JSON."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from gpt2.errors import UserError, log
from gpt2.evals.scoring import Score
from gpt2.utils import files


class Figure(NamedTuple):
    """A row of the table of scores: a score of a task, and its standard error over the examples.

    `convention` describes how the score was computed.
    """

    task: str
    metric: str
    value: float
    stderr: float
    num_examples: int
    convention: str


class Estimate(NamedTuple):
    """A value computed from examples, and its standard error."""

    value: float
    stderr: float  # NaN for a single example
    num_examples: int

    def scaled(self, factor: float) -> "Estimate":
        """Return the estimate multiplied by `factor`."""
        value, stderr, n = self
        return Estimate(factor * value, factor * stderr, n)

    def exp(self) -> "Estimate":
        """Return the perplexity, given that this estimate is a loss in nats.

        The standard error of the perplexity is the perplexity times the standard error of the loss.
        """
        # Beyond 700, the perplexity would overflow float64.
        value = math.exp(min(self.value, 700.0))
        return Estimate(value, value * self.stderr, self.num_examples)


Numbers = Sequence[float] | np.ndarray


def mean(values: Numbers) -> Estimate:
    """Return the mean and its standard error. `values` has one value for each example."""
    return ratio(values, np.ones(len(values)))


def ratio(numerators: Numbers, denominators: Numbers) -> Estimate:
    """Return sum(numerators) / sum(denominators). Both arguments have one value for each example.

    The standard error is that of the ratio estimator (Cochran 1977, section 2.11), under the
    assumption that examples are independent. Raise a UserError if the ratio is not finite.
    """
    x = np.asarray(numerators, np.float64)
    y = np.asarray(denominators, np.float64)
    n = len(x)
    # Every score passes through this function. NaN is an error, because JSON cannot represent it,
    # and because a table would show it like a result.
    if not y.sum() > 0 or not np.isfinite(x).all():
        raise UserError(
            f"The score of {n} examples is not a finite number",
            "Check that there are examples to score, and that the weights have no NaN or Inf",
        )
    value = float(x.sum() / y.sum())
    if n < 2:
        return Estimate(value, math.nan, n)
    residuals = np.linalg.norm(x - value * y) / y.sum()
    stderr = math.sqrt(n / (n - 1)) * residuals
    return Estimate(value, float(stderr), n)


def mean_loss(scores: Sequence[Score], units: int | None = None) -> Estimate:
    """Return the loss in nats per scored token or, if `units` is given, per unit of the text.

    `units` is the number of words, bytes or other units in the whole text. Each of `scores` belongs
    to a window over the text. A window may end within a unit, so the units are divided between the
    windows in proportion to their scored tokens.
    """
    losses = [-score.log_prob for score in scores]
    counts = np.array([score.count for score in scores], np.float64)
    if units is not None:
        counts *= units / counts.sum()
    return ratio(losses, counts)


def print_table(figures: Sequence[Figure]) -> None:
    """Print a table of scores and, below the table, how each score was computed."""
    table = Table("task", "metric", "value", "± stderr", "examples")
    for figure in figures:
        stderr = f"{figure.stderr:.2g}"
        if math.isnan(figure.stderr):
            stderr = "unknown"
        table.add_row(
            figure.task,
            figure.metric,
            f"{figure.value:.6g}",
            stderr,
            f"{figure.num_examples:,}",
        )
    console = Console(markup=False, highlight=False)
    # The scores of a task often share a convention, which is then printed once.
    conventions = [f"{figure.task}: {figure.convention}" for figure in figures]
    with console.capture() as text:
        for part in (table, *dict.fromkeys(conventions)):
            console.print(part)
    # `log` ignores a closed pipe, such as one to `head`, so that `--output` is still written.
    log(text.get().rstrip("\n"), sys.stdout)


def write_json(figures: Sequence[Figure], path: Path) -> None:
    """Write the scores as a JSON list of objects. An unknown standard error becomes null."""
    rows = [figure._asdict() for figure in figures]
    for row in rows:
        if math.isnan(row["stderr"]):
            row["stderr"] = None
    files.write_json(path, rows)
