"""Which arms of an ablation differ from its baseline, by how much, and what stayed invisible.

An arm is a set of runs that differ in their seed only. Differences are arm - baseline, in the unit
of the scores, which are losses: negative is better. The family-wise level (5 %) bounds the chance
of one false verdict or more among all arms; the confidence (95 %) is that of all intervals at once.

Unpaired, an arm differs if two tests say so. The wider of their intervals counts:

1. Dunnett's test (Dunnett 1955, JASA 50) of all arms. It pools variances, which makes much of few
   seeds, but takes the mean of a noisy arm, or of a noisy baseline, for more certain than it is.
   Arms with more than ten times the median variance are left out of the others' pool, which they
   would blind.
2. Welch's t-test (Welch 1947, Biometrika 34) of the pair alone, which lets variances differ, at
   level / sqrt(number of arms): halfway between no adjustment and Bonferroni's.

In percent, from 40,000 sweeps of 5 arms with n seeds each, simulated by
`python -m tests.programs.verdict_rates`:
false verdicts where all deviations are equal, where the baseline's is 3, and where one arm's is 3;
and how often an arm is found that differs by 5 standard errors. "Worst" is the highest rate of
false verdicts for 1 to 10 arms of 3 or 5 seeds, a baseline of as many, and deviations of 1 or 3;
with a baseline of another number, 3 to 10 seeds, our rule's is 8.4.

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

FOUND = ("better", "worse")  # the words of an arm that differs
_ROUNDING = 1e-12  # relative to the scores; a standard error below is no spread


@dataclass(frozen=True)
class Sample:
    """The runs of one arm, or of the baseline."""

    scores: Array  # final losses of the finished runs, [n]; finite
    diverged: int = 0  # runs without a score
    # Runs that broke for other reasons, which say nothing about the arm.
    failed: int = 0

    @property
    def mean(self) -> float:
        """The mean score; nan without any."""
        return float(self.scores.mean()) if len(self.scores) else math.nan

    @property
    def num_runs(self) -> int:
        """How many runs have ended."""
        return len(self.scores) + self.diverged + self.failed


@dataclass(frozen=True)
class Verdict:
    """What the runs say about one arm; differences are arm - baseline. nan: without a test."""

    difference: float
    words: str  # better, worse, undecided: at most 0.0123, or why there is no verdict
    baseline: float  # the mean of the baseline's scores that the difference is from
    low: float = math.nan  # of its interval, at once with the other arms'
    high: float = math.nan
    p_value: float = math.nan  # adjusted for the number of arms
    error: float = math.nan  # the difference's standard error by these runs alone
    # The smallest true difference that as many seeds, this noisy, find with a power of 0.8.
    detectable: Callable[[], float] = field(
        default=lambda: math.nan, repr=False, compare=False
    )


def compare(
    baseline: Sample,
    arms: Mapping[str, Sample],
    *,
    level: float = LEVEL,
) -> dict[str, Verdict]:
    """Judges each arm against the baseline, by the tests of the module's docstring.

    An arm with a diverged run has no verdict, since its survivors are not a fair sample, and no
    part in the tests of other arms. `level` is that of all arms together.
    """
    verdicts = {}
    judged = {}
    for name, arm in arms.items():
        words = _obstacle(baseline, arm)
        if not words:
            judged[name] = arm
            words = "the same score for every seed: no verdict"  # which a test replaces
        verdicts[name] = Verdict(arm.mean - baseline.mean, words, baseline.mean)
    return verdicts | _test(baseline, judged, level)


def _obstacle(baseline: Sample, arm: Sample) -> str:
    """Says why an arm has no verdict, or nothing if it may have one."""
    if arm.diverged:
        return f"diverged in {arm.diverged} of {arm.num_runs} runs"
    if baseline.diverged:
        share = f"{baseline.diverged} of {baseline.num_runs} runs"
        return f"the baseline diverged in {share}: no verdict"
    for sample, whose in ((arm, ""), (baseline, " of the baseline")):
        if len(sample.scores) < 2:
            return f"fewer than two runs{whose} finished: no verdict"
    return ""


def _decide(low: float, high: float) -> str:
    """Returns what an interval says."""
    if high < 0:
        return "better"
    if low > 0:
        return "worse"
    return f"undecided: at most {max(-low, high):.3g}"


def _test(
    baseline: Sample, arms: Mapping[str, Sample], level: float
) -> dict[str, Verdict]:
    """Tests by Dunnett's and Welch's methods, as the module's docstring says, where runs differ."""
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
