"""The numbers behind verdicts: quantiles, and the differences that are found with a power.

In all of them, `sizes` are the runs of the baseline, then of each arm, and `df` the degrees of
freedom of a deviation.
"""

import math
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import scipy  # loads its parts when they are used
from numpy.typing import NDArray

Array = NDArray[np.float64]
Numbers = float | Array

LEVEL = 0.05  # of one false verdict or more, all arms and looks together
POWER = 0.8  # of `Verdict.detectable`, and of what looks call hopeless
_NUM_DRAWN = 20_000
_OUTLYING = 10  # times the median variance of groups, above which an arm is not pooled

# A normal variable and its weights, for integrals by the trapezoidal rule.
_NORMAL = np.linspace(-8, 8, 129)
_NORMAL_WEIGHTS = np.exp(-(_NORMAL**2) / 2)
_NORMAL_WEIGHTS /= _NORMAL_WEIGHTS.sum()


def welch(
    variance0: Numbers, variance: Numbers, num0: int, num: int
) -> tuple[Array, Array]:
    """Returns the standard error of a difference of means and its degrees of freedom."""
    part0 = np.maximum(variance0 / num0, 1e-100)  # not 0 / 0
    part = np.maximum(variance / num, 1e-100)
    both = part0 + part
    slack0 = part0**2 / (num0 - 1)
    slack = part**2 / (num - 1)
    df = both**2 / (slack0 + slack)
    return np.sqrt(both), df


def dunnett_probability(bound: float, sizes: tuple[int, ...], df: int) -> float:
    """Returns how probably no arm's |t| is above `bound` if no arm differs.

    Given the baseline's mean and the pooled deviation, the arms are independent, which leaves two
    integrals (Dunnett 1955, section 3). scipy.stats.dunnett draws at random, 100 times as long.
    """
    noise, weights = _chi(df)
    nums = np.array(sizes[1:])
    shares = nums / (nums + sizes[0])
    correlation = shares[:, None, None]
    common = np.sqrt(correlation) * _NORMAL
    own = np.sqrt(1 - correlation)
    limit = bound * noise[:, None]
    below = scipy.special.ndtr((limit - common) / own)
    far_below = scipy.special.ndtr((-limit - common) / own)
    within = below - far_below
    together = within.prod(0)
    return float(weights @ together @ _NORMAL_WEIGHTS)


@cache
def dunnett_quantile(sizes: tuple[int, ...], level: float, df: int) -> float:
    """Returns the |t| that an arm exceeds with probability `level`, if no arm differs."""

    def excess(bound: float) -> float:
        return dunnett_probability(bound, sizes, df) - (1 - level)

    return scipy.optimize.brentq(excess, 0, 1e6)


class Design(NamedTuple):
    """Of how many runs an arm of a sweep is judged, and how strictly."""

    sizes: tuple[int, ...]
    arm: int  # its place in `sizes`
    level: float  # of all arms together


def pool(variances: Array, design: Design) -> tuple[Array, Array]:
    """Returns the variance within groups to judge an arm by, and its degrees of freedom.

    `variances` are those of the baseline and of each arm, `[..., 1 + arms]`. An arm far noisier
    than most says nothing about others; the baseline and the arm itself always count.
    """
    usual = np.median(variances, axis=-1, keepdims=True)
    counts = (variances <= _OUTLYING * usual) | (usual == 0)
    counts[..., [0, design.arm]] = True
    dfs = counts * (np.array(design.sizes) - 1)
    df = dfs.sum(-1)
    return (dfs * variances).sum(-1) / df, df


def group_half_width(design: Design, variances: Array) -> Array:
    """Returns the wider half of Dunnett's and Welch's intervals, for `variances` as of `pool`."""
    sizes, arm, level = design
    num = sizes[arm]
    pooled, df = pool(variances, design)
    pooled_error = np.sqrt(pooled * (1 / sizes[0] + 1 / num))
    quantile_at = np.vectorize(partial(dunnett_quantile, sizes, level))
    dunnett = quantile_at(df) * pooled_error
    error, error_df = welch(variances[..., 0], variances[..., arm], sizes[0], num)
    strictness = math.sqrt(len(sizes) - 1)
    quantile = scipy.stats.t.isf(level / strictness / 2, error_df)
    return np.maximum(dunnett, quantile * error)


def group_difference(design: Design, variances: Array) -> float:
    """Returns the true difference of an arm that groups find with `POWER`.

    `variances`, taken for the true ones, are those of the baseline and of each arm. What sweeps
    would estimate for them is drawn.
    """
    sizes = np.array(design.sizes)
    dfs = sizes - 1
    draw = np.random.default_rng(0).chisquare
    chi2 = np.stack([draw(df, _NUM_DRAWN) for df in dfs], axis=1)
    drawn = variances * chi2 / dfs
    half_widths = group_half_width(design, drawn)
    ends = [0, design.arm]
    true_error, _ = welch(*variances[ends], *sizes[ends])

    def lack(difference: float) -> float:
        found = scipy.special.ndtr((difference - half_widths) / true_error)
        return POWER - found.mean()

    highest = half_widths.max() + 10 * true_error
    return scipy.optimize.brentq(lack, 0, highest)


@cache
def _chi(df: int) -> tuple[Array, Array]:
    """Returns values of an estimated deviation whose true one is 1, and their weights."""
    chi = scipy.stats.chi(df)
    low = chi.ppf(1e-13)
    high = chi.isf(1e-13)
    nodes, weights = np.polynomial.legendre.leggauss(40)
    values = low + (high - low) * (nodes + 1) / 2
    weights *= chi.pdf(values)
    weights /= weights.sum()
    return values / math.sqrt(df), weights
