"""The numbers behind verdicts: quantiles, power, seeds that are needed, intervals.

In all of them, `sizes` are the runs of the baseline, then of each arm, and `df` the degrees of
freedom of a deviation.
"""

import bisect
import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import scipy  # loads its parts when they are used
from numpy.typing import NDArray

Array = NDArray[np.float64]

CONFIDENCE = 0.95  # of all intervals together
POWER = 0.8  # of `Verdict.detectable`
_NORMAL = np.linspace(-8, 8, 129)  # a normal variable, for integrals by the trapezoidal rule
_NORMAL_WEIGHTS = np.exp(-(_NORMAL**2) / 2) / np.exp(-(_NORMAL**2) / 2).sum()


def power_of(shift: float, num: int, *, num_arms: int = 1, paired: bool = False) -> float:
    """Returns how probably `compare` finds a true difference of one arm with its right sign.

    `shift` is the difference over the deviation between seeds (paired: of differences by seed),
    `num` the seeds of each arm and of the baseline.
    """
    if paired:
        quantile = pair_quantile(num - 1, num_arms)
        return float(scipy.stats.nct.sf(quantile, num - 1, abs(shift) * math.sqrt(num)))
    sizes = (num,) * (1 + num_arms)
    half_widths, weights = _half_widths(sizes, num, sum(sizes) - len(sizes), (1.0,) * 3)
    return float(weights @ scipy.special.ndtr((abs(shift) - half_widths) / math.sqrt(2 / num)))


def seeds_needed(shift: float, *, num_arms: int = 1, paired: bool = False) -> int:
    """Returns the fewest seeds with which `power_of` a shift that is not 0 reaches `POWER`."""

    def suffices(num: int) -> bool:
        return power_of(shift, num, num_arms=num_arms, paired=paired) >= POWER

    high = 2
    while not suffices(high):
        high *= 2
    return bisect.bisect_left(range(high), True, lo=high // 2 + 1, key=suffices)


def deviation_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the chi-square interval, (low, high), of the standard deviation of normal values."""
    tails = scipy.stats.chi2.isf([(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], len(values) - 1)
    low, high = np.sqrt(len(values) * np.var(values) / tails)
    return float(low), float(high)


def ratio_interval(
    values: Sequence[float], others: Sequence[tuple[float, int]] = ()
) -> tuple[float, float, float]:
    """Returns the geometric mean of ratios and the t interval of its logarithm: (mean, low, high).

    `others` is what else is uncertain in that logarithm, independently: squared standard errors and
    their degrees of freedom. The ends are nan where a ratio is 0 or inf, and for a single one.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(np.asarray(values, np.float64))
        mean = logs.mean()
    half_width = math.nan
    if len(logs) > 1 and np.isfinite(mean) and all(df > 0 for _, df in others):
        parts = [(float(logs.var(ddof=1)) / len(logs), len(logs) - 1), *others]
        quantile = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, satterthwaite(parts))
        half_width = quantile * math.sqrt(sum(square for square, _ in parts))
    middle, low, high = np.exp([mean, mean - half_width, mean + half_width])
    return float(middle), float(low), float(high)


def satterthwaite(parts: Sequence[tuple[float, int]]) -> float:
    """Returns the degrees of freedom of a sum of variances (Satterthwaite 1946, Biometrics 2).

    Each part is a variance and its own degrees of freedom, above 0.
    """
    variances, dfs = np.array(parts).T
    variances = np.maximum(variances, 1e-100)  # not 0 / 0
    return float(variances.sum() ** 2 / (variances**2 / dfs).sum())


def welch(variance0: Array, variance: Array, num0: int, num: int) -> tuple[Array, Array]:
    """Returns the standard error of a difference of means and its degrees of freedom."""
    part0, part = (np.maximum(x, 1e-100) for x in (variance0 / num0, variance / num))  # not 0 / 0
    df = (part0 + part) ** 2 / (part0**2 / (num0 - 1) + part**2 / (num - 1))
    return np.sqrt(part0 + part), df


def dunnett_probability(bound: float, sizes: tuple[int, ...], df: int) -> float:
    """Returns how probably no arm's |t| is above `bound` if no arm differs.

    Given the baseline's mean and the pooled deviation, the arms are independent, which leaves two
    integrals (Dunnett 1955, section 3). scipy.stats.dunnett draws at random, and takes 100 times
    the time.
    """
    noise, weights = _chi(df)
    nums, counts = np.unique(sizes[1:], return_counts=True)
    correlation = (nums / (nums + sizes[0]))[:, None, None]
    common, own = np.sqrt(correlation) * _NORMAL, np.sqrt(1 - correlation)
    limit = bound * noise[:, None]
    within = scipy.special.ndtr((limit - common) / own) - scipy.special.ndtr(
        (-limit - common) / own
    )
    together = (within ** counts[:, None, None]).prod(0)
    return float(weights @ together @ _NORMAL_WEIGHTS)


@cache
def dunnett_quantile(sizes: tuple[int, ...], df: int) -> float:
    """Returns the |t| that no arm exceeds with probability `CONFIDENCE`, if no arm differs."""

    def excess(bound: float) -> float:
        return dunnett_probability(bound, sizes, df) - CONFIDENCE

    tail = (1 - CONFIDENCE) / 2
    one_arm, bonferroni = scipy.stats.t.isf([tail, tail / (len(sizes) - 1)], df)  # on either side
    return float(scipy.optimize.brentq(excess, 0.99 * one_arm, 1.01 * bonferroni))


@cache
def group_difference(
    sizes: tuple[int, ...], num: int, df: int, variances: tuple[float, ...]
) -> float:
    """Returns the true difference of an arm of `num` runs that groups find with `POWER`.

    `variances` are those of the baseline, of the arm, and of the other arms together, as if those
    measured were the true ones.
    """
    half_widths, weights = _half_widths(sizes, num, df, variances)
    error = math.sqrt(max(variances[0] / sizes[0] + variances[1] / num, 1e-100))

    def lack(difference: float) -> float:
        return POWER - float(weights @ scipy.special.ndtr((difference - half_widths) / error))

    return float(scipy.optimize.brentq(lack, 0, half_widths.max() + 10 * error))


def pair_quantile(df: int, num_arms: int) -> float:
    """Returns the |t| that an arm's pairs have to exceed, by Šidák's formula (1967, JASA 62)."""
    return float(scipy.stats.t.ppf((1 + CONFIDENCE ** (1 / num_arms)) / 2, df))


def pair_difference(error: float, quantile: float, df: int) -> float:
    """Returns the true difference that pairs find with `POWER`; `error` is that of their mean."""

    def lack(shift: float) -> float:
        return POWER - float(scipy.stats.nct.sf(quantile, df, shift))

    return error * float(scipy.optimize.brentq(lack, 0, 3 * quantile + 3))


def _half_widths(
    sizes: tuple[int, ...], num: int, df: int, variances: tuple[float, ...]
) -> tuple[Array, Array]:
    """Returns half-widths that true variances lead to, and their weights; see group_difference."""
    dfs = sizes[0] - 1, num - 1, df - (sizes[0] - 1) - (num - 1)  # the last: of all other arms
    noises, weights = zip(*map(_chi, dfs, (24, 24, 12)), strict=True)
    estimates = (x * noise**2 for x, noise in zip(variances, noises, strict=True))
    variance0, variance, others = np.meshgrid(*estimates, indexing="ij")
    pooled = sum(each * x for each, x in zip(dfs, (variance0, variance, others), strict=True)) / df
    welch_error, welch_df = welch(variance0[..., 0], variance[..., 0], sizes[0], num)
    level = (1 - CONFIDENCE) / math.sqrt(len(sizes) - 1)
    half_widths = np.maximum(
        dunnett_quantile(sizes, df) * np.sqrt(pooled * (1 / sizes[0] + 1 / num)),
        (scipy.stats.t.isf(level / 2, welch_df) * welch_error)[..., None],
    )
    return half_widths.ravel(), np.einsum("i,j,k->ijk", *weights).ravel()


@cache
def _chi(df: int, num: int = 40) -> tuple[Array, Array]:
    """Returns `num` values of an estimated deviation whose true one is 1, and their weights."""
    if not df:
        return np.zeros(1), np.ones(1)
    low, high = np.sqrt([scipy.stats.chi2.ppf(1e-13, df), scipy.stats.chi2.isf(1e-13, df)])
    nodes, weights = np.polynomial.legendre.leggauss(num)
    values = low + (high - low) * (nodes + 1) / 2
    weights = weights * scipy.stats.chi.pdf(values, df)
    return values / math.sqrt(df), weights / weights.sum()
