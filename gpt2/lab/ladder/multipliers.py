"""Compute multipliers of an arm over a ladder of sizes, and a verdict on how they change.

The baseline's curve connects its mean losses by straight lines, in log loss against log compute.
The multiplier of an arm at a size is the compute at which this curve reaches the arm's loss,
divided by the arm's compute. Below, m is the vector of the decimal logarithms of the multipliers,
one for each size, and x is the vector of the decimal logarithms of the baseline's compute.

Runs with the same seed share their data and their initial weights, so runs are paired by seed. Each
statistic, such as the slope of m against x, is a weighted sum of m, and a smooth function of the
mean losses. The delta method yields the variance of a statistic, as a sum over sizes: each size
contributes the variance over seeds of `g_b L_b + g_a L_a`, divided by the number of seeds. L_b and
L_a are the losses of baseline and arm, and g_b and g_a are the derivatives of the statistic with
respect to their means. The degrees of freedom are Satterthwaite's (1946, Biometrics Bulletin 2).
The variance is correct for any correlation between the runs of a pair.

Each arm has the level alpha / (number of arms). Two questions about the arm have half of this level
each:

1. Does the multiplier change? `grows` and `fades` mean that the two-sided interval of the slope
   excludes 0. `flips` means that, in addition, the intervals of the first and the last m exclude 0
   on opposite sides.
2. Does the multiplier stay the same? `constant` means that, by two one-sided tests (Schuirmann
   1987), the multiplier changes by less than a factor of 1.5 for ten times the compute.

`python -m tests.programs.ladder_rates` simulates how often such verdicts are wrong.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy  # imports its parts when they are used

from gpt2.lab.ablate.power import LEVEL, Array
from gpt2.lab.experiments.decisions import Decision

# A constant multiplier changes by less than this factor for ten times the compute.
STAYS = 1.5
# Multipliers are extrapolated to this number times the largest compute.
FARTHEST = 10.0


class Losses(NamedTuple):
    """The final losses of one arm at one size, one for each seed, and the compute of one run."""

    compute: float
    scores: Array


class Interval(NamedTuple):
    """An estimate and the ends of its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Course:
    """How one arm's compute multiplier changes with size."""

    words: str  # a Decision, or why there is no verdict
    multipliers: Sequence[Interval] = ()  # one for each size, smallest first
    # The factor by which the multiplier changes for ten times the compute.
    slope: Interval | None = None
    # The range of the multiplier at `FARTHEST` times the largest compute: the lowest and the
    # highest end of the intervals for three forms of the curve.
    forecast: tuple[float, float] | None = None


def judge_course(
    baseline: Sequence[Losses],
    arm: Sequence[Losses],
    *,
    level: float = LEVEL,
    num_arms: int = 1,
) -> Course:
    """Return the course of an arm. Baseline and arm have the same seeds and the same sizes."""
    means = np.array([losses.scores.mean() for losses in baseline])
    if (np.diff(means) >= 0).any():
        return Course("no verdict: the baseline does not improve with its size")
    ladder = _Ladder(baseline, arm)
    x = ladder.x
    question = level / num_arms / 2
    at_size = np.eye(len(x))
    of_slope = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    slope = ladder.interval(of_slope, question)
    narrow = ladder.interval(of_slope, 2 * question)  # for two one-sided tests
    first = ladder.interval(at_size[0], question)
    last = ladder.interval(at_size[-1], question)
    words = Decision.UNDECIDED
    if slope.low > 0:
        words = Decision.GROWS
    elif slope.high < 0:
        words = Decision.FADES
    elif max(-narrow.low, narrow.high) < math.log10(STAYS):
        words = Decision.CONSTANT
    if words in (Decision.GROWS, Decision.FADES):
        rises = first.high < 0 < last.low
        falls = last.high < 0 < first.low
        if rises or falls:
            words = Decision.FLIPS

    multipliers = []
    for weights in at_size:
        multipliers.append(_exp10(ladder.interval(weights, level / num_arms)))
    forecasts = []
    for weights in _forecast_weights(x):
        forecasts.append(_exp10(ladder.interval(weights, level / num_arms)))
    return Course(
        words=words,
        multipliers=multipliers,
        slope=_exp10(slope),
        forecast=(
            min(forecast.low for forecast in forecasts),
            max(forecast.high for forecast in forecasts),
        ),
    )


def _forecast_weights(x: Array) -> list[Array]:
    """Return the weights of m in the forecasts for `FARTHEST` times the largest compute.

    There is one array for each form of the curve: constant, linear and saturating. Saturating means
    that each decade of compute halves the remaining change. Each form is fitted to all sizes with
    least squares.
    """
    decades = np.append(x, x[-1] + math.log10(FARTHEST)) - x[0]
    ones = np.ones_like(decades)
    forms = ([ones], [ones, decades], [ones, 0.5**decades])
    weights = []
    for columns in forms:
        table = np.stack(columns, axis=1)
        weights.append(table[-1] @ np.linalg.pinv(table[:-1]))
    return weights


class _Ladder:
    """Intervals of weighted sums of m, for the losses of a baseline and an arm."""

    def __init__(self, baseline: Sequence[Losses], arm: Sequence[Losses]):
        self.x = np.log10([losses.compute for losses in baseline])
        self._arm_x = np.log10([losses.compute for losses in arm])
        # An array [baseline and arm, seeds] for each size.
        self._scores = [
            np.stack([ours.scores, theirs.scores])
            for ours, theirs in zip(baseline, arm, strict=True)
        ]
        means = np.array([scores.mean(1) for scores in self._scores])
        self._m = self._logs(means)
        # The derivatives of m with respect to each mean, [sizes, baseline and arm, len(m)].
        self._derivatives = np.empty((*means.shape, len(means)))
        for index in np.ndindex(means.shape):
            step = np.zeros_like(means)
            step[index] = 1e-6 * means[index]
            change = self._logs(means + step) - self._logs(means - step)
            self._derivatives[index] = change / (2 * step[index])

    def interval(self, weights: Array, level: float) -> Interval:
        """Return `weights @ m` with its two-sided interval at the error rate `level`."""
        value = float(weights @ self._m)
        gradients = self._derivatives @ weights
        parts = []
        dfs = []
        for gradient, scores in zip(gradients, self._scores, strict=True):
            by_seed = gradient @ scores
            parts.append(by_seed.var(ddof=1) / by_seed.size)
            dfs.append(by_seed.size - 1)
        variances = np.maximum(parts, 1e-30)  # avoids 0 / 0
        variance = variances.sum()
        df = variance**2 / (variances**2 / dfs).sum()
        quantile = -scipy.special.stdtrit(df, level / 2)  # quantile of Student's t
        half_width = quantile * math.sqrt(variance)
        return Interval(value, value - half_width, value + half_width)

    def _logs(self, means: Array) -> Array:
        """Return m for mean losses `[sizes, 2]` of baseline and arm."""
        curve, arm = np.log10(means).T
        return _reach(curve, self.x, arm) - self._arm_x


def _reach(curve: Array, x: Array, targets: Array) -> Array:
    """Return the x at which a falling curve reaches each target.

    Beyond its ends, the curve is extended by its first and its last line.
    """
    slopes = np.diff(x) / np.diff(curve)
    segments = np.searchsorted(-curve, -targets) - 1
    segments = np.clip(segments, 0, len(slopes) - 1)
    return x[segments] + slopes[segments] * (targets - curve[segments])


def _exp10(interval: Interval) -> Interval:
    return Interval(*(float(10**value) for value in interval))
