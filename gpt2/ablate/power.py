"""The numbers behind verdicts: quantiles, and the differences that are found with a power.

In all of them, `sizes` are the runs of the baseline, then of each arm, and `df` the degrees of
freedom of a deviation.
"""

import math
from functools import cache

import numpy as np
import scipy  # loads its parts when they are used
from numpy.typing import NDArray

Array = NDArray[np.float64]

LEVEL = 0.05  # of one false verdict or more, all arms and looks together
POWER = 0.8  # of `Verdict.detectable`, and of planned seeds
_NUM_DRAWN = 20_000
_NORMAL = np.linspace(
    -8, 8, 129
)  # a normal variable, for integrals by the trapezoidal rule
_NORMAL_WEIGHTS = np.exp(-(_NORMAL**2) / 2) / np.exp(-(_NORMAL**2) / 2).sum()


def welch(
    variance0: Array, variance: Array, num0: int, num: int
) -> tuple[Array, Array]:
    """Returns the standard error of a difference of means and its degrees of freedom."""
    part0, part = (
        np.maximum(x, 1e-100) for x in (variance0 / num0, variance / num)
    )  # not 0 / 0
    df = (part0 + part) ** 2 / (part0**2 / (num0 - 1) + part**2 / (num - 1))
    return np.sqrt(part0 + part), df


def same_difference(differences: Array, errors: Array, dfs: Array) -> Array:
    """Returns the p-value of true differences `[..., sizes]` that are all one.

    By Welch's test of means whose errors differ (1951, Biometrika 38).
    """
    num = differences.shape[-1]
    weights = errors**-2.0
    share = weights / weights.sum(-1, keepdims=True)
    middle = (share * differences).sum(-1, keepdims=True)
    between = (weights * (differences - middle) ** 2).sum(-1) / (num - 1)
    slack = ((1 - share) ** 2 / dfs).sum(-1) / (num**2 - 1)
    return scipy.stats.f.sf(
        between / (1 + 2 * (num - 2) * slack), num - 1, 1 / (3 * slack)
    )


def dunnett_probability(bound: float, sizes: tuple[int, ...], df: int) -> float:
    """Returns how probably no arm's |t| is above `bound` if no arm differs.

    Given the baseline's mean and the pooled deviation, the arms are independent, which leaves two
    integrals (Dunnett 1955, section 3). scipy.stats.dunnett draws at random, 100 times as long.
    """
    noise, weights = _chi(df)
    nums, counts = np.unique(sizes[1:], return_counts=True)
    correlation = (nums / (nums + sizes[0]))[:, None, None]
    common = np.sqrt(correlation) * _NORMAL
    own = np.sqrt(1 - correlation)
    limit = bound * noise[:, None]
    normal = scipy.special.ndtr
    within = normal((limit - common) / own) - normal((-limit - common) / own)
    together = (within ** counts[:, None, None]).prod(0)
    return float(weights @ together @ _NORMAL_WEIGHTS)


@cache
def dunnett_quantile(sizes: tuple[int, ...], df: int, level: float) -> float:
    """Returns the |t| that an arm exceeds with probability `level`, if no arm differs."""

    def excess(bound: float) -> float:
        return dunnett_probability(bound, sizes, df) - (1 - level)

    tails = level / 2, level / 2 / (len(sizes) - 1)
    one_arm, bonferroni = scipy.stats.t.isf(tails, df)  # on either side
    return float(scipy.optimize.brentq(excess, 0.99 * one_arm, 1.01 * bonferroni))


@cache
def group_difference(
    sizes: tuple[int, ...],
    num: int,
    df: int,
    variances: tuple[float, ...],
    level: float,
) -> float:
    """Returns the true difference of an arm of `num` runs that groups find with `POWER`.

    `variances`, taken for the true ones, are the baseline's, the arm's, and all others' together.
    What sweeps would estimate for them is drawn.
    """
    dfs = (
        sizes[0] - 1,
        num - 1,
        df - (sizes[0] - 1) - (num - 1),
    )  # the last: of all other arms
    gamma = np.random.default_rng(0).standard_gamma
    squares = [
        x * 2 * gamma(each / 2, _NUM_DRAWN)
        for x, each in zip(variances, dfs, strict=True)
    ]
    welch_error, welch_df = welch(
        squares[0] / dfs[0], squares[1] / dfs[1], sizes[0], num
    )
    half_widths = np.maximum(
        dunnett_quantile(sizes, df, level)
        * np.sqrt(sum(squares) / df * (1 / sizes[0] + 1 / num)),
        scipy.stats.t.isf(level / math.sqrt(len(sizes) - 1) / 2, welch_df)
        * welch_error,
    )
    error = math.sqrt(max(variances[0] / sizes[0] + variances[1] / num, 1e-100))

    def lack(difference: float) -> float:
        return POWER - float(
            scipy.special.ndtr((difference - half_widths) / error).mean()
        )

    return float(scipy.optimize.brentq(lack, 0, half_widths.max() + 10 * error))


def pair_quantile(df: int, num_arms: int, level: float) -> float:
    """Returns the |t| that an arm's pairs have to exceed, by Šidák's formula (1967, JASA 62)."""
    return float(scipy.stats.t.ppf((1 + (1 - level) ** (1 / num_arms)) / 2, df))


def pair_difference(error: float, quantile: float, df: int) -> float:
    """Returns the true difference that pairs find with `POWER`; `error` is that of their mean."""

    def lack(shift: float) -> float:
        return POWER - float(scipy.stats.nct.sf(quantile, df, shift))

    return error * float(scipy.optimize.brentq(lack, 0, 3 * quantile + 3))


@cache
def _chi(df: int) -> tuple[Array, Array]:
    """Returns values of an estimated deviation whose true one is 1, and their weights."""
    low, high = np.sqrt(
        [scipy.stats.chi2.ppf(1e-13, df), scipy.stats.chi2.isf(1e-13, df)]
    )
    nodes, weights = np.polynomial.legendre.leggauss(40)
    values = low + (high - low) * (nodes + 1) / 2
    weights = weights * scipy.stats.chi.pdf(values, df)
    return values / math.sqrt(df), weights / weights.sum()
