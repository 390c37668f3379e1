"""Compute multipliers of an arm over a ladder of sizes, and a verdict on how they change.

The baseline's curve connects its mean losses by straight lines, in log loss against log compute.
The multiplier of an arm at a size is the compute at which this curve reaches the arm's loss,
divided by the arm's compute. Below, m is the vector of the decimal logarithms of the multipliers,
one for each size, and x is the vector of the decimal logarithms of the baseline's compute.

Beyond the largest size, the baseline's curve continues straight. But if the loss has an irreducible
part, the true curve flattens. The multiplier at the largest size is then too small, and a constant
multiplier seems to fall slightly. Verdicts are therefore about changes beyond a factor of 1.5 per
decade of compute.

Runs with the same seed share their data and their initial weights, so runs are paired by seed. Each
statistic, such as the slope of m against x, is a weighted sum of m, and a smooth function of mean
losses and mean log computes. Let the vector v contain the losses and the log computes of a pair of
runs, and the vector g the derivatives of the statistic with respect to the means of v. By the delta
method, the variance of the statistic is a sum over sizes: each size contributes the variance over
seeds of `g . v`, divided by the number of seeds. This is correct for any correlation between the
runs of a pair. v contains the log computes because seconds differ between seeds; FLOPs do not. The
degrees of freedom are Satterthwaite's (1946, Biometrics Bulletin 2).

The two-sided intervals of an arm have the error rate level / (number of arms), where `level` is the
error rate of all arms together. The verdict `constant` means that the interval of the slope lies
within a band: the multiplier changes by less than a factor of 1.5 for ten times the compute (two
one-sided tests, Schuirmann 1987). `grows` means that the interval lies above this band, and `fades`
means that the interval lies below it. `flips` means that the intervals of the first and the last m
exclude 0 on opposite sides.

`python -m tests.programs.ladder_rates` simulates how often such verdicts are wrong.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy  # imports its parts when they are used

from gpt2.lab.ablate.power import LEVEL, Array, Numbers
from gpt2.lab.experiments.decisions import Decision

# The verdict `constant`: the multiplier changes by less than this factor for ten times the compute.
STAYS = 1.5
# Multipliers are extrapolated to this number times the largest compute.
FARTHEST = 10.0


class Losses(NamedTuple):
    """The runs of one arm at one size: their compute and their final losses, by seed."""

    compute: Numbers  # one number if it is the same for each seed
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
) -> Course:
    """Return how an arm's compute multiplier changes with size, and a verdict on the change.

    `baseline` and `arm` contain the losses at each size, the smallest size first. At a size, both
    must have the same seeds, because runs are paired by seed. `level` is the error rate for this
    arm.
    """
    means = np.array([losses.scores.mean() for losses in baseline])
    if (np.diff(means) >= 0).any():
        return Course("no verdict: the baseline does not improve with its size")
    ladder = _Ladder(baseline, arm)
    x = ladder.x
    slope_weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    slope = ladder.interval(slope_weights, level)
    at_sizes = [ladder.interval(weights, level) for weights in np.eye(len(x))]
    first = at_sizes[0]
    last = at_sizes[-1]
    band = math.log10(STAYS)
    words = Decision.UNDECIDED
    if first.high < 0 < last.low or last.high < 0 < first.low:
        words = Decision.FLIPS
    elif slope.low > band:
        words = Decision.GROWS
    elif slope.high < -band:
        words = Decision.FADES
    elif -band < slope.low and slope.high < band:
        words = Decision.CONSTANT

    forecasts = []
    for weights in _forecast_weights(x):
        forecasts.append(_exp10(ladder.interval(weights, level)))
    return Course(
        words=words,
        multipliers=[_exp10(multiplier) for multiplier in at_sizes],
        slope=_exp10(slope),
        forecast=(
            min(forecast.low for forecast in forecasts),
            max(forecast.high for forecast in forecasts),
        ),
    )


def _forecast_weights(x: Array) -> list[Array]:
    """Return the weights with which log multipliers are summed to forecast a multiplier.

    The forecast is the log multiplier at `FARTHEST` times the largest compute. `x` are the decimal
    logarithms of the compute at each size. There is one array `[sizes]` of weights for each form
    that the log multiplier may have as a function of log compute: constant, linear and saturating.
    Saturating means that each decade of compute halves the remaining change. Each form is fitted to
    all sizes with least squares.
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
    """Confidence intervals of weighted sums of m, the log multipliers of an arm at each size."""

    def __init__(self, baseline: Sequence[Losses], arm: Sequence[Losses]):
        # For each size, an array [4, seeds]: the baseline's losses, the arm's losses, and the log10
        # of the baseline's and of the arm's compute.
        self._values = []
        for ours, theirs in zip(baseline, arm, strict=True):
            rows = [
                ours.scores,
                theirs.scores,
                np.log10(ours.compute),
                np.log10(theirs.compute),
            ]
            self._values.append(np.stack(np.broadcast_arrays(*rows)))
        means = np.array([values.mean(1) for values in self._values])
        self.x = means[:, 2]
        self._m = _log_multipliers(means)
        # The derivatives of m with respect to each mean, [sizes, 4, len(m)].
        self._derivatives = np.empty((*means.shape, len(means)))
        for index in np.ndindex(means.shape):
            step = np.zeros_like(means)
            step[index] = 1e-6
            change = _log_multipliers(means + step) - _log_multipliers(means - step)
            self._derivatives[index] = change / 2e-6

    def interval(self, weights: Array, level: float) -> Interval:
        """Return `weights @ m` with its two-sided interval at the error rate `level`.

        m are the arm's log multipliers, one for each size.
        """
        value = float(weights @ self._m)
        gradients = self._derivatives @ weights
        parts = []
        dfs = []
        for gradient, values in zip(gradients, self._values, strict=True):
            by_seed = gradient @ values
            parts.append(by_seed.var(ddof=1) / by_seed.size)
            dfs.append(by_seed.size - 1)
        variances = np.maximum(parts, 1e-30)  # avoids 0 / 0
        variance = variances.sum()
        df = variance**2 / (variances**2 / dfs).sum()
        quantile = -scipy.special.stdtrit(df, level / 2)  # quantile of Student's t
        half_width = quantile * math.sqrt(variance)
        return Interval(value, value - half_width, value + half_width)


def _log_multipliers(means: Array) -> Array:
    """Return the decimal logarithms of an arm's compute multipliers, `[sizes]`.

    The columns of `means` `[sizes, 4]` are the mean loss of the baseline, the mean loss of the arm,
    and the means of the decimal logarithms of the compute of the baseline and of the arm.
    """
    curve, arm = np.log10(means[:, :2]).T
    x, arm_x = means[:, 2:].T
    return _reach(curve, x, arm) - arm_x


def _reach(curve: Array, x: Array, targets: Array) -> Array:
    """Return the x at which a falling curve reaches each target.

    The curve connects the points (`x`, `curve`) by straight lines. Beyond its ends, the curve
    continues along its first and its last segment.
    """
    slopes = np.diff(x) / np.diff(curve)
    segments = np.searchsorted(-curve, -targets) - 1
    segments = np.clip(segments, 0, len(slopes) - 1)
    return x[segments] + slopes[segments] * (targets - curve[segments])


def _exp10(interval: Interval) -> Interval:
    """Return powers of ten, limited to a million and its inverse, which stand for all beyond."""
    return Interval(*(10.0 ** np.clip(interval, -6, 6)).tolist())
