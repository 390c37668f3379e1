"""The numbers behind verdicts: quantiles, and the differences that are found with a power.

In all of them, `sizes` are the runs of the baseline, then of each arm, and `df` the degrees of
freedom of a deviation.
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import scipy  # loads its parts when they are used
from numpy.typing import NDArray

Array = NDArray[np.float64]
Numbers = float | Array

LEVEL = 0.05  # of one false verdict or more, all arms and looks together
POWER = 0.8  # of `Verdict.detectable`, and of what looks call hopeless
_NUM_DRAWN = 20_000

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
def dunnett_quantile(sizes: tuple[int, ...], df: int, level: float) -> float:
    """Returns the |t| that an arm exceeds with probability `level`, if no arm differs."""

    def excess(bound: float) -> float:
        return dunnett_probability(bound, sizes, df) - (1 - level)

    return scipy.optimize.brentq(excess, 0, 1e6)


class Design(NamedTuple):
    """Of how many runs an arm of a sweep is judged, and how strictly."""

    sizes: tuple[int, ...]
    num: int  # of this arm
    df: int  # of the pooled variance
    level: float  # of all arms together


def group_half_width(
    design: Design, pooled: Numbers, variance0: Numbers, variance: Numbers
) -> Array:
    """Returns the wider half of Dunnett's and Welch's intervals.

    Variances are the pooled one, the baseline's and the arm's.
    """
    sizes, num, df, level = design
    per_run = 1 / sizes[0] + 1 / num
    pooled_error = np.sqrt(pooled * per_run)
    dunnett = dunnett_quantile(sizes, df, level) * pooled_error
    error, error_df = welch(variance0, variance, sizes[0], num)
    strictness = math.sqrt(len(sizes) - 1)
    quantile = scipy.stats.t.isf(level / strictness / 2, error_df)
    return np.maximum(dunnett, quantile * error)


def group_difference(design: Design, variances: tuple[float, ...]) -> float:
    """Returns the true difference of an arm that groups find with `POWER`.

    `variances`, taken for the true ones, are the baseline's, the arm's, and all others' together.
    What sweeps would estimate for them is drawn.
    """
    num0 = design.sizes[0]
    df0 = num0 - 1
    df_arm = design.num - 1
    gamma = np.random.default_rng(0).standard_gamma
    squares = []  # sums of squared deviations, [_NUM_DRAWN] each
    dfs = (df0, df_arm, design.df - df0 - df_arm)
    for each, each_df in zip(variances, dfs, strict=True):
        chi2 = 2 * gamma(each_df / 2, _NUM_DRAWN)
        squares.append(each * chi2)
    pooled = sum(squares) / design.df
    half_widths = group_half_width(
        design, pooled, squares[0] / df0, squares[1] / df_arm
    )
    true_error, _ = welch(variances[0], variances[1], num0, design.num)

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
