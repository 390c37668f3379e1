"""Verdicts: which arms differ from the baseline, by how much, and how sure that is.

An arm is a set of runs that differ in their seed only. Differences are arm - baseline, in the unit
of the scores. Scores are losses, so negative differences are better. The family-wise level (5 %)
bounds the probability of one or more false verdicts among all arms. All intervals hold together
with 95 %.

The tests are unpaired. An arm differs if both of them say so, and the wider of their intervals
counts:

1. Dunnett's test (Dunnett 1955, JASA 50) of all arms. It pools the variances, which gives few seeds
   more power. But it takes the mean of a noisy arm, or of a noisy baseline, for more certain than
   it is. An arm with more than ten times the median variance does not enter the pool of the other
   arms, because it would hide their differences.
2. Welch's t-test (Welch 1947, Biometrika 34) of the pair alone, in which variances may differ, at
   level / sqrt(number of arms). That is halfway between no adjustment and Bonferroni's.

The table is in percent, from 40,000 simulated sweeps of 5 arms with n seeds each (`python -m
tests.programs.verdict_rates`). It lists how often a sweep has a false verdict, where all standard
deviations are equal, where the baseline's is 3, and where one arm's is 3; how often an arm is found
whose true difference is 5 standard errors; and, as "worst", the highest rate of false verdicts for
1 to 10 arms of 3 or 5 seeds, a baseline with the same number, and standard deviations of 1 or 3.
With a baseline of another number of seeds, 3 to 10, the worst rate of our rule is 8.4.

                                      equal       baseline       one arm        found     worst
                                    n=3  n=5      n=3  n=5      n=3  n=5      n=3  n=5
    Dunnett alone                   4.9  4.8     17.4 17.2     10.3  9.8     96.9 98.4     25.1
    Welch alone, Šidák's level      2.4  3.4      2.8  2.6      3.1  4.0     45.0 87.2      6.6
    both, as here                   2.0  3.0      4.5  4.7      3.3  4.0     68.5 95.1      5.4
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import scipy  # loads its parts when they are used

from gpt2.lab.ablate.power import (
    LEVEL,
    Array,
    Design,
    dunnett_probability,
    group_difference,
    group_half_width,
    pool,
    welch,
)

CLEAR = ("better", "worse")  # the words of an arm that differs
_ROUNDING = 1e-12  # relative to the scores; a smaller standard error counts as zero


@dataclass(frozen=True)
class Sample:
    """The runs of one arm, or of the baseline."""

    scores: Array  # final losses of the finished runs, [n]; finite
    diverged: int = 0  # runs whose loss became NaN or Inf
    failed: int = 0  # runs that ended for reasons that say nothing about the arm

    @property
    def mean(self) -> float:
        """The mean score; NaN without scores."""
        return float(self.scores.mean()) if len(self.scores) else math.nan

    @property
    def num_runs(self) -> int:
        """The number of runs that have ended."""
        return len(self.scores) + self.diverged + self.failed


@dataclass(frozen=True)
class Verdict:
    """What the runs say about one arm. Numbers are NaN if no test applies."""

    difference: float  # arm - baseline
    words: str  # better, worse, undecided: at most 0.0123, or why there is no verdict
    baseline: float  # the mean of the baseline's scores that was subtracted
    # The end of an interval that holds together with the other arms'.
    low: float = math.nan
    high: float = math.nan
    p_value: float = math.nan  # adjusted for the number of arms
    # The difference's standard error, from the runs of both alone.
    error: float = math.nan
    # The smallest true difference that such runs find with a power of 0.8.
    detectable: Callable[[], float] = field(
        default=lambda: math.nan, repr=False, compare=False
    )


def compare(
    baseline: Sample,
    arms: Mapping[str, Sample],
    *,
    level: float = LEVEL,
) -> dict[str, Verdict]:
    """Return the verdict on each arm, by the tests of the module's docstring.

    An arm with a diverged run has no verdict, because its other runs are not a fair sample, and it
    does not enter the tests of other arms. `level` bounds false verdicts among all arms.
    """
    verdicts = {}
    judged = {}
    for name, arm in arms.items():
        words = _obstacle(baseline, arm)
        if not words:
            judged[name] = arm
            # A test replaces these words if the scores differ.
            words = "the same score for every seed: no verdict"
        verdicts[name] = Verdict(arm.mean - baseline.mean, words, baseline.mean)
    if judged:
        verdicts |= _test(baseline, judged, level)
    return verdicts


def _obstacle(baseline: Sample, arm: Sample) -> str:
    """Return why no test applies to an arm; "" if one does."""
    if arm.diverged:
        return f"diverged in {arm.diverged} of {arm.num_runs} runs"
    if baseline.diverged:
        runs = f"{baseline.diverged} of {baseline.num_runs} runs"
        return f"the baseline diverged in {runs}: no verdict"
    for sample, whose in ((arm, ""), (baseline, " of the baseline")):
        if len(sample.scores) < 2:
            return f"fewer than two runs{whose} finished: no verdict"
    return ""


def _decide(low: float, high: float) -> str:
    """Return the words for an interval of the difference."""
    if high < 0:
        return "better"
    if low > 0:
        return "worse"
    return f"undecided: at most {max(-low, high):.3g}"


def _test(
    baseline: Sample, arms: Mapping[str, Sample], level: float
) -> dict[str, Verdict]:
    """Return the verdicts on the arms whose scores differ, by Dunnett's and Welch's tests."""
    first = baseline.scores
    groups = [first, *(arm.scores for arm in arms.values())]
    variances = np.array([group.var(ddof=1) for group in groups])
    sizes = tuple(map(len, groups))
    strictness = math.sqrt(len(arms))  # of Welch's test
    verdicts = {}
    for i, name in enumerate(arms, start=1):
        design = Design(sizes, i, level)
        difference = arms[name].mean - baseline.mean
        pooled, df = pool(variances, design)
        error = math.sqrt(pooled * (1 / sizes[0] + 1 / sizes[i]))
        if error <= _ROUNDING * np.abs(first).max():
            continue
        half_width = float(group_half_width(design, variances))
        low = difference - half_width
        high = difference + half_width
        distance = abs(difference)
        dunnett = 1 - dunnett_probability(distance / error, sizes, int(df))
        welch_error, welch_df = welch(variances[0], variances[i], sizes[0], sizes[i])
        alone = 2 * scipy.stats.t.sf(distance / welch_error, welch_df)
        p_value = max(dunnett, strictness * alone)
        verdicts[name] = Verdict(
            difference=difference,
            words=_decide(low, high),
            baseline=baseline.mean,
            low=low,
            high=high,
            p_value=float(np.clip(p_value, 0, 1)),
            error=float(welch_error),
            detectable=partial(group_difference, design, variances),
        )
    return verdicts
