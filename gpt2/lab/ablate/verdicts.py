"""Verdicts: which arms differ from the baseline, by how much, and with what uncertainty.

The runs of an arm differ only in their seed. Differences are arm - baseline, in the unit of the
scores. Scores are losses, so negative differences are better. The family-wise level is the
probability of one or more false verdicts among all arms. It is nominally 5 %. In simulations, it is
at most 8.4 % (see below). The intervals of all arms together have a nominal confidence of 95 %.

An arm differs if both of the tests below find a difference. The interval of its difference is the
wider one of the intervals of the two tests. Both tests are unpaired, and assume normal scores:

1. Dunnett's test (Dunnett 1955, JASA 50) of all arms together. It pools the variances, which gives
   the test more power if there are few seeds. But the pooled variance is too small for an arm or a
   baseline whose losses vary more than the others. An arm with more than ten times the median
   variance is left out when the variance is pooled for other arms. Otherwise the pooled variance
   would hide their differences.
2. Welch's t-test (Welch 1947, Biometrika 34) of the arm and the baseline alone, whose variances may
   differ, at level / sqrt(number of arms). That is the geometric mean of the unadjusted level and
   Bonferroni's level.

The numbers in the table are percentages, from 40,000 simulated sweeps of 5 arms with n seeds each
(`python -m tests.programs.verdict_rates`). The first three columns are the rates of sweeps with a
false verdict: with equal standard deviations of 1, with a standard deviation of 3 for the baseline,
and with 3 for one arm. "found" is the rate at which the tests find an arm with a true difference of
5 standard errors. "worst" is the highest rate of false verdicts for 1 to 10 arms with 3 or 5 seeds,
a baseline with the same number of seeds, and standard deviations of 1 or 3. If the baseline has
another number of seeds, from 3 to 10, the worst rate of both tests together is 8.4 %.

                                      equal       baseline       one arm        found     worst
                                    n=3  n=5      n=3  n=5      n=3  n=5      n=3  n=5
    Dunnett alone                   4.9  4.8     17.4 17.2     10.3  9.8     96.9 98.4     25.1
    Welch alone, Šidák's level      2.4  3.4      2.8  2.6      3.1  4.0     45.0 87.2      6.6
    both, as here                   2.0  3.0      4.5  4.7      3.3  4.0     68.5 95.1      5.4

A paired sweep uses another test: for each arm, Student's t-test of the differences between runs
with the same seed, at level / (number of arms), which is Bonferroni's level. The test assumes that
the differences are normal. Their variances may differ between arms. A variance that is pooled over
all arms would be too large for arms that are strongly correlated with the baseline, and would hide
their differences.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pandas as pd
import scipy  # its submodules are imported when they are used

from gpt2.lab.ablate.power import (
    LEVEL,
    Design,
    dunnett_probability,
    group_difference,
    group_half_width,
    paired_difference,
    pool,
    welch,
)
from gpt2.lab.experiments.decisions import Decision

CLEAR = (Decision.BETTER, Decision.WORSE)  # the verdicts on an arm that differs
# A standard error of at most this fraction of the scores counts as 0: it is a result of rounding.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class ArmScores:
    """The results of the runs of one arm, or of the baseline."""

    scores: pd.Series  # the final losses of the finished runs, by seed; all are finite
    diverged: int = 0  # number of runs whose loss or gradients became NaN or Inf
    failed: int = 0  # number of runs that ended early without diverging

    @property
    def mean(self) -> float:
        """The mean score, or NaN if there are no scores."""
        return float(self.scores.mean()) if len(self.scores) else math.nan

    @property
    def num_runs(self) -> int:
        """The number of runs that have ended."""
        return len(self.scores) + self.diverged + self.failed


@dataclass(frozen=True)
class Verdict:
    """The verdict on one arm. If no test applies, the numbers that a test computes are NaN."""

    difference: float  # arm - baseline
    # A Decision, or why there is no verdict.
    words: str
    baseline: float  # the baseline's mean score, subtracted from the arm's
    # The ends of the interval of the difference. The intervals of all arms hold simultaneously.
    low: float = math.nan
    high: float = math.nan
    p_value: float = math.nan  # adjusted for the number of arms
    # The standard error of the difference, estimated only from the arm and the baseline.
    error: float = math.nan
    pairs: int = 0  # the number of pairs of runs, if the test is paired
    # Returns the smallest true difference that a sweep with these variances and numbers of runs
    # detects with a probability of 0.8.
    detectable: Callable[[], float] = field(
        default=lambda: math.nan, repr=False, compare=False
    )


def compare(
    baseline: ArmScores,
    arms: Mapping[str, ArmScores],
    *,
    level: float = LEVEL,
    paired: bool = False,
) -> dict[str, Verdict]:
    """Return the verdict on each arm, by name.

    The tests are Dunnett's and Welch's or, with `paired`, paired t-tests. An arm with a diverged
    run has no verdict, because its other runs are not a fair sample. The tests of the other arms do
    not use its runs. `level` bounds the probability of one or more false verdicts among all arms.
    """
    verdicts = {}
    judged = {}
    test = _test_pairs if paired else _test
    constant = "difference" if paired else "score"
    for name, arm in arms.items():
        words = _obstacle(baseline, arm, paired)
        if not words:
            judged[name] = arm
            # If the scores are not all the same, the result of `test` below replaces these words.
            words = f"the same {constant} for every seed: no verdict"
        verdicts[name] = Verdict(arm.mean - baseline.mean, words, baseline.mean)
    if judged:
        verdicts |= test(baseline, judged, level)
    return verdicts


def _obstacle(baseline: ArmScores, arm: ArmScores, paired: bool) -> str:
    """Return why no test applies to an arm, or "" if a test applies."""
    if arm.diverged:
        return f"diverged in {arm.diverged} of {arm.num_runs} runs"
    if baseline.diverged:
        runs = f"{baseline.diverged} of {baseline.num_runs} runs"
        return f"the baseline diverged in {runs}: no verdict"
    for sample, whose in ((arm, ""), (baseline, " of the baseline")):
        if len(sample.scores) < 2:
            return f"fewer than two runs{whose} finished: no verdict"
    if paired and arm.scores.index.isin(baseline.scores.index).sum() < 2:
        return "fewer than two pairs finished: no verdict"
    return ""


def _decide(low: float, high: float) -> str:
    """Return the words of the verdict, given the ends of the interval of arm - baseline."""
    if high < 0:
        return Decision.BETTER
    if low > 0:
        return Decision.WORSE
    return Decision.UNDECIDED


def _test(
    baseline: ArmScores, arms: Mapping[str, ArmScores], level: float
) -> dict[str, Verdict]:
    """Return the verdicts of Dunnett's and Welch's tests.

    `level` is the error rate of all arms together. Arms whose pooled variance is 0 are left out,
    because the tests divide by this variance.
    """
    first = baseline.scores.to_numpy()
    groups = [first, *(arm.scores.to_numpy() for arm in arms.values())]
    variances = np.array([group.var(ddof=1) for group in groups])
    sizes = tuple(map(len, groups))
    strictness = math.sqrt(len(arms))  # divides the level of Welch's test
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


def _test_pairs(
    baseline: ArmScores, arms: Mapping[str, ArmScores], level: float
) -> dict[str, Verdict]:
    """Return the verdicts of paired t-tests.

    `level` is the error rate of all arms together. Arms whose differences are all the same are left
    out, because the tests divide by the spread of the differences.
    """
    level_of_arm = level / len(arms)
    verdicts = {}
    for name, arm in arms.items():
        scores, baselines = arm.scores.align(baseline.scores, join="inner")
        differences = scores - baselines
        error = differences.sem()
        if error <= _ROUNDING * baselines.abs().max():
            continue
        test = scipy.stats.ttest_rel(scores, baselines)
        low, high = test.confidence_interval(1 - level_of_arm)
        verdicts[name] = Verdict(
            difference=differences.mean(),
            words=_decide(low, high),
            baseline=baselines.mean(),
            low=low,
            high=high,
            p_value=min(test.pvalue * len(arms), 1.0),
            error=error,
            pairs=len(differences),
            detectable=partial(paired_difference, error, test.df, level_of_arm),
        )
    return verdicts
