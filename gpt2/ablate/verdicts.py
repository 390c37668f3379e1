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

In percent, from 40,000 sweeps that `python -m tests.verdict_rates` simulates, 5 arms, n seeds each:
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import scipy  # loads its parts when they are used

from gpt2.ablate.power import (
    LEVEL,
    Array,
    dunnett_probability,
    dunnett_quantile,
    group_difference,
    pair_difference,
    pair_quantile,
    welch,
)
from gpt2.utils.text import counted

FOUND = ("better", "worse")  # the words of an arm that differs
_ROUNDING = 1e-12  # relative to the scores; a standard error below is no spread
_OUTLYING = (
    10  # times the median variance of the groups, above which an arm is not pooled
)


@dataclass(frozen=True)
class Sample:
    """The runs of one arm, or of the baseline."""

    scores: Mapping[int, float]  # final losses of the finished runs, by seed; finite
    diverged: int = 0  # runs without a score
    failed: int = (
        0  # runs that broke for other reasons, which say nothing about the arm
    )

    @property
    def values(self) -> Array:
        """The scores, `[n]`."""
        return np.array(list(self.scores.values()), np.float64)

    @property
    def diverged_share(self) -> str:
        """Such as "2 of 5 runs"."""
        return (
            f"{self.diverged} of {len(self.scores) + self.diverged + self.failed} runs"
        )


@dataclass(frozen=True)
class Verdict:
    """What the runs say about one arm; differences are arm - baseline."""

    difference: float  # paired, over the seeds that both have
    low: float  # of its interval, at once with the other arms'; nan without a test
    high: float
    p_value: float  # adjusted for the number of arms; nan without a test
    words: str  # better, worse, no difference larger than 0.0123, or why there is no verdict
    method: str  # the test, for a report; empty without one
    error: float  # the difference's standard error by these runs alone, and
    df: float  # its degrees of freedom; nan without a test
    # The smallest true difference that as many seeds, this noisy, find with a power of 0.8.
    detectable: Callable[[], float] = field(repr=False, compare=False)


class _Test(NamedTuple):
    half_width: float  # of the interval around the difference
    p_value: float
    method: str
    error: float
    df: float
    detectable: Callable[[], float]


_NO_TEST = _Test(math.nan, math.nan, "", math.nan, math.nan, lambda: math.nan)


def compare(
    baseline: Sample,
    arms: Mapping[str, Sample],
    *,
    paired: bool = False,
    level: float = LEVEL,
) -> dict[str, Verdict]:
    """Judges each arm against the baseline, by the tests of the module's docstring.

    An arm with a diverged run has no verdict, since its survivors are not a fair sample, and no
    part in the tests of other arms. `paired` tests differences by seed, at Šidák's level. `level`
    is that of all arms together.
    """
    obstacles = {name: _obstacle(baseline, arm, paired) for name, arm in arms.items()}
    judged = {name: arm for name, arm in arms.items() if not obstacles[name]}
    test_all = _test_pairs if paired else _test_groups
    tests = test_all(baseline, judged, level) if judged else {}
    verdicts = {}
    for name, arm in arms.items():
        difference = _mean(arm.values) - _mean(baseline.values)
        words = obstacles[name]
        if paired:
            difference = _mean(_paired_differences(baseline, arm))
        test = tests.get(name, _NO_TEST)
        low = difference - test.half_width
        high = difference + test.half_width
        if not words and math.isnan(test.half_width):
            words = f"the same {'difference' if paired else 'score'} for every seed: no verdict"
        elif not words and low <= 0 <= high:
            words = f"no difference larger than {max(-low, high):.3g}"
        words = words or ("better" if high < 0 else "worse")
        verdicts[name] = Verdict(difference, low, high, test.p_value, words, *test[2:])
    return verdicts


def _obstacle(baseline: Sample, arm: Sample, paired: bool) -> str:
    """Says why an arm has no verdict, or nothing if it may have one."""
    if arm.diverged:
        return f"diverged in {arm.diverged_share}"
    if baseline.diverged:
        return f"the baseline diverged in {baseline.diverged_share}: no verdict"
    for sample, whose in ((arm, ""), (baseline, " of the baseline")):
        if len(sample.scores) < 2:
            return f"{'one' if sample.scores else 'no'} run{whose} finished: no verdict"
    if paired and len(_paired_differences(baseline, arm)) < 2:
        return "fewer than two seeds shared with the baseline: no verdict"
    return ""


def _paired_differences(baseline: Sample, arm: Sample) -> Array:
    """Returns arm - baseline for each seed that both have."""
    seeds = sorted(baseline.scores.keys() & arm.scores.keys())
    return np.array(
        [arm.scores[seed] - baseline.scores[seed] for seed in seeds], np.float64
    )


def _mean(values: Array) -> float:
    return float(values.mean()) if values.size else math.nan


def _test_pairs(
    baseline: Sample, arms: Mapping[str, Sample], level: float
) -> dict[str, _Test]:
    """Tests the differences by seed, each arm with its own variance."""
    tests = {}
    for name, arm in arms.items():
        differences = _paired_differences(baseline, arm)
        num_arms = len(arms)
        num = len(differences)
        error = float(differences.std(ddof=1)) / math.sqrt(num)
        if error <= _ROUNDING * np.abs(baseline.values).max():
            tests[name] = _NO_TEST
            continue
        quantile = pair_quantile(num - 1, num_arms, level)
        p_value = 2 * scipy.stats.t.sf(abs(differences.mean()) / error, num - 1)
        tests[name] = _Test(
            half_width=quantile * error,
            p_value=float(
                -scipy.special.expm1(scipy.special.xlog1py(num_arms, -p_value))
            ),
            error=error,
            df=num - 1,
            detectable=partial(pair_difference, error, quantile, num - 1),
            method=f"two-sided t-test of {num} differences by seed, adjusted for "
            f"{counted(num_arms, 'arm')} by Šidák's formula",
        )
    return tests


def _test_groups(
    baseline: Sample, arms: Mapping[str, Sample], level: float
) -> dict[str, _Test]:
    """Tests by Dunnett's and Welch's methods, as the module's docstring says."""
    groups = [baseline.values, *(arm.values for arm in arms.values())]
    sizes = tuple(len(group) for group in groups)
    strictness = math.sqrt(len(arms))  # of Welch's test
    tests = {}
    for i, (name, group) in enumerate(zip(arms, groups[1:], strict=True), start=1):
        pooled, df, rest = _pooled_deviation(groups, i)
        error = pooled * math.sqrt(1 / sizes[0] + 1 / len(group))
        if error <= _ROUNDING * np.abs(baseline.values).max():
            tests[name] = _NO_TEST
            continue
        variances = groups[0].var(ddof=1), group.var(ddof=1)
        welch_error, welch_df = welch(*variances, sizes[0], len(group))
        half_widths = (
            dunnett_quantile(sizes, df, level) * error,
            scipy.stats.t.isf(level / strictness / 2, welch_df) * welch_error,
        )
        distance = abs(group.mean() - groups[0].mean())
        p_values = (
            1 - dunnett_probability(distance / error, sizes, df),
            strictness * 2 * scipy.stats.t.sf(distance / welch_error, welch_df),
        )
        measured = (*map(float, variances), rest)
        tests[name] = _Test(
            half_width=float(max(half_widths)),
            p_value=float(np.clip(max(p_values), 0, 1)),
            error=float(welch_error),
            df=float(welch_df),
            detectable=partial(
                group_difference, sizes, len(group), df, measured, level
            ),
            method=f"two-sided, for {counted(len(arms), 'arm')}: Dunnett's test with pooled "
            f"variances, and Welch's t-test of each pair at level / {strictness:.3g}; the wider "
            "interval counts",
        )
    return tests


def _pooled_deviation(groups: Sequence[Array], index: int) -> tuple[float, int, float]:
    """Returns the deviation within groups to judge one of them by, and its degrees of freedom.

    An arm far noisier than most says nothing about others; groups[0] and `index` always count. The
    last of what is returned is the variance of all others that count, 0 for none.
    """
    variances = np.array([group.var(ddof=1) for group in groups])
    usual = float(np.median(variances))
    counts = (variances <= _OUTLYING * usual) | (usual == 0)
    counts[[0, index]] = True
    dfs = np.array([len(group) - 1 for group in groups]) * counts
    others = dfs.copy()
    others[[0, index]] = 0
    pooled = math.sqrt(float(dfs @ variances / dfs.sum()))
    return pooled, int(dfs.sum()), float(others @ variances / max(1, others.sum()))
