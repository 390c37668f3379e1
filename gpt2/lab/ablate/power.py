"""The statistics behind verdicts: quantiles, intervals, and detectable differences.

Throughout, `sizes` are the numbers of runs of the baseline and then of each arm, and `df` are
degrees of freedom.
"""

import math
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import scipy  # its submodules are imported when they are used
from numpy.typing import NDArray

Array = NDArray[np.float64]
Numbers = float | Array

# The probability of one or more false verdicts among all arms and all analyses.
LEVEL = 0.05
POWER = 0.8  # the power of `Verdict.detectable` and of the futility rule
_NUM_DRAWN = 20_000  # number of simulated sweeps
# `pool` excludes an arm with more than 10 times the median variance, unless it is the tested arm.
_OUTLYING = 10

# Nodes and weights of the trapezoidal rule, for expectations over a standard normal variable.
_NORMAL = np.linspace(-8, 8, 129)
_NORMAL_WEIGHTS = np.exp(-(_NORMAL**2) / 2)
_NORMAL_WEIGHTS /= _NORMAL_WEIGHTS.sum()


def welch(
    variance0: Numbers, variance: Numbers, num0: int, num: int
) -> tuple[Array, Array]:
    """Return Welch's standard error of a difference of two means, and its degrees of freedom.

    `variance0` and `variance` are the variances of the two samples, and `num0` and `num` are their
    numbers of runs.
    """
    part0 = np.maximum(variance0 / num0, 1e-100)  # avoids 0 / 0
    part = np.maximum(variance / num, 1e-100)
    both = part0 + part
    slack0 = part0**2 / (num0 - 1)
    slack = part**2 / (num - 1)
    df = both**2 / (slack0 + slack)
    return np.sqrt(both), df


def dunnett_probability(bound: float, sizes: tuple[int, ...], df: int) -> float:
    """Return the probability that no arm's |t| exceeds `bound` if no arm truly differs.

    `sizes` are the numbers of runs of the baseline and then of each arm. `df` are the degrees of
    freedom of the pooled variance. Given the baseline's mean and the pooled standard deviation, the
    t values of the arms are independent. The probability is therefore an integral over this mean
    and this standard deviation (Dunnett 1955, section 3). scipy.stats.dunnett draws random numbers
    instead, and takes 100 times as long.
    """
    noise, weights = _chi(df)
    nums = np.array(sizes[1:])
    fractions = nums / (nums + sizes[0])
    correlation = fractions[:, None, None]
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
    """Return the |t| that one or more arms exceed with probability `level` if no arm truly differs.

    `sizes` are the numbers of runs of the baseline and then of each arm. `df` are the degrees of
    freedom of the pooled variance.
    """

    def excess(bound: float) -> float:
        return dunnett_probability(bound, sizes, df) - (1 - level)

    return scipy.optimize.brentq(excess, 0, 1e6)


class Design(NamedTuple):
    """The design of the test of an arm: the numbers of runs, the tested arm, and the level."""

    sizes: tuple[int, ...]  # of the baseline and then of each arm
    arm: int  # the index of the tested arm in `sizes`
    level: float  # the level for all arms together


def pool(variances: Array, design: Design) -> tuple[Array, Array]:
    """Return the pooled variance for the test of an arm, and its degrees of freedom.

    `variances` `[..., 1 + arms]` are the variances of the baseline and then of each arm. The pool
    excludes arms whose variance is far above the median, but always includes the baseline and the
    tested arm.
    """
    usual = np.median(variances, axis=-1, keepdims=True)
    counts = (variances <= _OUTLYING * usual) | (usual == 0)
    counts[..., [0, design.arm]] = True
    dfs = counts * (np.array(design.sizes) - 1)
    df = dfs.sum(-1)
    return (dfs * variances).sum(-1) / df, df


def group_half_width(design: Design, variances: Array) -> Array:
    """Return half the width of the interval of the tested arm's difference from the baseline.

    The interval is the wider one of the intervals of Dunnett's and Welch's tests. `variances`
    `[..., 1 + arms]` are the variances of the baseline and then of each arm.
    """
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
    """Return the smallest true difference that both tests find with probability `POWER`.

    The tests are Dunnett's and Welch's tests of the arm `design.arm`. `variances` `[1 + arms]`, of
    the baseline and then of each arm, are assumed to be the true variances. The variances that
    sweeps would estimate from their runs are simulated.
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


def paired_difference(error: float, df: int, level: float) -> float:
    """Return the smallest true difference that a paired t-test finds with probability `POWER`.

    `error` is assumed to be the true standard error of the mean difference. `df` is the number of
    pairs minus 1, and `level` is the error rate of the test.
    """
    quantile = scipy.stats.t.isf(level / 2, df)

    def lack(errors: float) -> float:
        return POWER - scipy.stats.nct.sf(quantile, df, errors)

    highest = 2 * quantile + 10  # in standard errors
    return error * scipy.optimize.brentq(lack, 0, highest)


@cache
def _chi(df: int) -> tuple[Array, Array]:
    """Return nodes and weights of a quadrature over the distribution of a standard deviation.

    It is the estimate with `df` degrees of freedom of a true standard deviation of 1.
    """
    chi = scipy.stats.chi(df)
    low = chi.ppf(1e-13)
    high = chi.isf(1e-13)
    nodes, weights = np.polynomial.legendre.leggauss(40)
    values = low + (high - low) * (nodes + 1) / 2
    weights *= chi.pdf(values)
    weights /= weights.sum()
    return values / math.sqrt(df), weights
