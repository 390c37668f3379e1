"""Simulate how often verdicts are false or true: the rates of gpt2/lab/ablate and its page.

`python -m tests.programs.verdict_rates` simulates sweeps of five arms whose scores are normal.
The rules are implemented again here, for many sweeps at the same time.
"""

import itertools
import math

import numpy as np
import pandas as pd
from scipy import stats

from gpt2.lab.ablate.judge import analysis_level, is_arm_futile
from gpt2.lab.ablate.power import dunnett_quantile, welch

NUM_SWEEPS = 40_000
NUM_ARMS = 5
# An arm with more than this number times the median variance is not pooled for other arms.
OUTLYING = 10
CHUNK = 10_000  # number of sweeps that are drawn at a time
ANALYSES = (3, 5, 8)
NOISY = {
    "equal": (1.0,) * 6,
    "baseline": (3.0,) + (1.0,) * 5,
    "one arm": (1.0, 3.0) + (1.0,) * 4,
}


def draw(rng, sizes, deviations, shift=0.0):
    """Return the scores of a baseline and of each arm, `[CHUNK, runs]`. `shift` the first arm."""
    scores = []
    for size, deviation in zip(sizes, deviations, strict=True):
        scores.append(rng.normal(0.0, deviation, (CHUNK, size)))
    scores[1] += shift
    return scores


def moments(scores):
    """Return means and variances, `[CHUNK, 1 + arms]`."""
    means = [runs.mean(1) for runs in scores]
    variances = [runs.var(1, ddof=1) for runs in scores]
    return np.stack(means, 1), np.stack(variances, 1)


def dunnett(means, variances, sizes, *, drop=False, level=0.05):
    """Return which arms differ in Dunnett's test, `[CHUNK, arms]`. `drop` outlying variances."""
    dfs = np.array(sizes) - 1
    in_pool = np.ones_like(variances, bool)
    if drop:
        in_pool = variances <= OUTLYING * np.median(variances, 1, keepdims=True)
    in_order = (sizes[0], *sorted(sizes[1:]))
    found = []
    for i in range(1, len(sizes)):
        in_pool_of_arm = in_pool.copy()
        in_pool_of_arm[:, [0, i]] = True
        counted = in_pool_of_arm * dfs
        df = counted.sum(1)
        pooled = np.sqrt((counted * variances).sum(1) / df)
        error = pooled * math.sqrt(1 / sizes[0] + 1 / sizes[i])
        quantiles = np.empty(len(df))
        for number in set(df):
            quantile = dunnett_quantile(in_order, level, int(number))
            quantiles[df == number] = quantile
        found.append(np.abs(means[:, i] - means[:, 0]) > quantiles * error)
    return np.stack(found, 1)


def welch_alone(means, variances, sizes, level):
    """Return which arms differ in Welch's t-test at a level."""
    found = []
    for i in range(1, len(sizes)):
        error, df = welch(variances[:, 0], variances[:, i], sizes[0], sizes[i])
        bound = stats.t.isf(level / 2, df) * error
        found.append(np.abs(means[:, i] - means[:, 0]) > bound)
    return np.stack(found, 1)


def sidak(means, variances, sizes):
    """Return which arms differ in Welch's test at Šidák's level."""
    num_arms = len(sizes) - 1
    return welch_alone(means, variances, sizes, 1 - 0.95 ** (1 / num_arms))


def both(means, variances, sizes, level=0.05):
    """Return which arms differ according to the rule of gpt2/lab/ablate/verdicts.py."""
    num_arms = len(sizes) - 1
    alone = welch_alone(means, variances, sizes, level / math.sqrt(num_arms))
    together = dunnett(means, variances, sizes, drop=True, level=level)
    return alone & together


def paired(scores):
    """Return which arms of a paired sweep differ. `scores` are `[num, seeds, 1 + arms]`."""
    differences = scores[..., 1:] - scores[..., :1]
    _, num_seeds, num_arms = differences.shape
    error = differences.std(1, ddof=1) / math.sqrt(num_seeds)
    bound = stats.t.isf(0.05 / num_arms / 2, num_seeds - 1) * error
    return np.abs(differences.mean(1)) > bound


def unpaired(scores):
    """Return which arms of an unpaired sweep differ. `scores` are `[num, seeds, 1 + arms]`."""
    _, num_seeds, groups = scores.shape
    return both(scores.mean(1), scores.var(1, ddof=1), (num_seeds,) * groups)


RULES = {"Dunnett alone": dunnett, "Welch alone, Šidák's level": sidak, "both": both}


def rates(sizes, deviations, shift=0.0, num=NUM_SWEEPS):
    """Return the percentage of sweeps in which each rule finds any arm (the first, if shifted)."""
    rng = np.random.default_rng(0)
    percent = dict.fromkeys(RULES, 0.0)
    for _ in range(num // CHUNK):
        drawn = moments(draw(rng, sizes, deviations, shift))
        for name, rule in RULES.items():
            found = rule(*drawn, sizes)
            if shift:
                found = found[:, :1]
            percent[name] += 100 * found.any(1).sum() / num
    return percent


def draw_looks(deviations, shifts=(), num=CHUNK):
    """Return the scores of a baseline and arms, `[num, seeds of the last analysis, 1 + arms]`.

    `shifts` of the first arms are in standard errors of a difference at the last analysis.
    """
    rng = np.random.default_rng(0)
    num_seeds = ANALYSES[-1]
    scores = deviations * rng.standard_normal((num, num_seeds, len(deviations)))
    scores[..., 1 : 1 + len(shifts)] += np.array(shifts) * math.sqrt(2 / num_seeds)
    return scores


def analyse(scores, analyses=ANALYSES):
    """Return which arms analyses find, `[num, arms]`, and how many runs each sweep trains."""
    num, _, groups = scores.shape
    arms = groups - 1
    seeds = np.zeros((num, groups), int)
    is_open = np.ones((num, arms), bool)
    found = np.zeros_like(is_open)
    for analysis in analyses:
        goes_on = is_open.any(1)
        seeds[goes_on, 0] = analysis
        seeds[:, 1:][is_open] = analysis
        for sizes in np.unique(seeds[goes_on], axis=0).tolist():
            rows = np.flatnonzero((seeds == sizes).all(1) & goes_on)
            drawn = [scores[rows, :n, i] for i, n in enumerate(sizes)]
            means, variances = moments(drawn)
            clear = both(means, variances, sizes, analysis_level(analyses, analysis))
            found[rows] |= clear & is_open[rows]
            is_open[rows] &= ~clear
            if analysis == analyses[-1]:
                continue
            first, *others = sizes
            errors, _ = welch(
                variances[:, :1], variances[:, 1:], first, np.array(others)
            )
            distances = np.abs(means[:, 1:] - means[:, :1])
            is_open[rows] &= ~is_arm_futile(
                distances / errors, arms, analyses, analysis
            )
    return found, seeds.sum(1)


def describe(found):
    """Return the fraction of sweeps in which anything is found, with the 95 % interval."""
    count = int(found.sum())
    interval = stats.binomtest(count, len(found)).proportion_ci(method="exact")
    return f"{count / len(found):.1%} ({interval.low:.1%} to {interval.high:.1%})"


def print_looks():
    """Print how often analyses find differences, false and true."""
    for name, deviations in NOISY.items():
        scores = draw_looks(deviations)
        differing = draw_looks(deviations, (2.0, 4.0, 6.0, 12.0))
        for analyses in (ANALYSES, ANALYSES[-1:]):
            found, runs = analyse(scores, analyses)
            print(f"{analyses}, {name}: {runs.mean():.1f} runs")
            print(f"    false {describe(found.any(1))}")
            found, runs = analyse(differing, analyses)
            print(f"    with arms that differ: {runs.mean():.1f} runs")
            for i in range(4):
                print(f"    arm {i + 1} {describe(found[:, i])}")


def draw_pairs(seeds, arms, correlation, deviation=1.0, shift=0.0, num=NUM_SWEEPS):
    """Return scores `[num, seeds, 1 + arms]`. Runs with the same seed are correlated.

    `deviation` is the baseline's. `shift` the first arm by this number of standard errors of an
    unpaired difference.
    """
    rng = np.random.default_rng(0)
    common = rng.standard_normal((num, seeds, 1))
    own = rng.standard_normal((num, seeds, 1 + arms))
    scores = math.sqrt(correlation) * common + math.sqrt(1 - correlation) * own
    scores[..., 0] *= deviation
    scores[..., 1] += shift * math.sqrt(2 / seeds)
    return scores


def print_pairs():
    """Print how often unpaired and paired sweeps find differences, false and true."""
    rows = {}
    cases = {"false": (1.0, 0.0), "false, noisy baseline": (3.0, 0.0)}
    cases |= {"found 3": (1.0, 3.0), "found 5": (1.0, 5.0)}
    sizes = itertools.product((1, 5), (3, 5))
    for (arms, seeds), case in itertools.product(sizes, cases):
        row = {}
        for correlation in (0.0, 0.5, 0.9):
            scores = draw_pairs(seeds, arms, correlation, *cases[case])
            for rule in (unpaired, paired):
                found = rule(scores)[:, : 1 if cases[case][1] else arms]
                row[f"{rule.__name__}, {correlation}"] = 100 * found.any(1).mean()
        rows[f"arms {arms}, seeds {seeds}: {case}"] = row
    print(pd.DataFrame(rows).T.round(1).to_string())


def draw_skewed(seeds, num=NUM_SWEEPS):
    """Return scores of sweeps without a true difference, `[num, seeds, 6]`, by kind of baseline.

    A skewed baseline is an exponential variable with a standard deviation of 3. A baseline with
    rare disasters is better by 1 than the arms at nine of ten seeds, and worse by 9 at the others.
    """
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((num, seeds, 1 + NUM_ARMS))
    skewed = normal.copy()
    skewed[..., 0] = 3 * (rng.exponential(size=(num, seeds)) - 1)
    disasters = normal.copy()
    disasters[..., 0] += np.where(rng.random((num, seeds)) < 0.1, 9.0, -1.0)
    return {"normal": normal, "skewed": skewed, "disasters": disasters}


def largest_outliers(scores):
    """Return Grubbs's statistic of a sweep: its largest distance of a run from its arm's mean.

    Distances are in standard deviations of the arm. The result is `[num]`.
    """
    distances = np.abs(scores - scores.mean(1, keepdims=True))
    return (distances / scores.std(1, ddof=1, keepdims=True)).max((1, 2))


def print_skewed():
    """Print the rates of false verdicts for skewed scores, and how often a warning precedes them.

    The warning is about a run that is so far from its arm that 5 % of normal sweeps have such a
    run.
    """
    for seeds in (3, 5, 40):
        drawn = draw_skewed(seeds)
        border = np.quantile(largest_outliers(drawn["normal"]), 0.95)
        for name, scores in drawn.items():
            warned = largest_outliers(scores) > border
            print(f"{seeds} seeds, {name}: a warning in {warned.mean():.1%}")
            for rule in (unpaired, paired):
                false = rule(scores).any(1)
                print(f"    {rule.__name__}: false {describe(false)}")
                print(f"    a warning in {warned[false].mean():.1%} of these")


def worst_rates():
    """Return the highest rates of false verdicts of each rule.

    `alike` is for a baseline with the same number of seeds as the arms. `others` is for a baseline
    with another number of seeds.
    """
    worst = {"alike": dict.fromkeys(RULES, 0.0), "others": dict.fromkeys(RULES, 0.0)}
    for arms, num, first in itertools.product((1, 2, 5, 10), (3, 5), (3, 5, 10)):
        highest = worst["alike" if num == first else "others"]
        for noisy, deviation in itertools.product((0, 1, arms // 2, arms), (1.0, 3.0)):
            deviations = [deviation, *[3.0] * noisy, *[1.0] * (arms - noisy)]
            sizes = (first, *[num] * arms)
            for name, rate in rates(sizes, deviations, num=20_000).items():
                highest[name] = max(highest[name], rate)
    return worst


def main():
    columns = {}
    for num in (3, 5):
        for name, deviations in NOISY.items():
            columns[f"{name} n={num}"] = rates((num,) * 6, deviations)
        shift = 5 * math.sqrt(2 / num)
        columns[f"found n={num}"] = rates((num,) * 6, NOISY["equal"], shift)
    columns |= worst_rates()
    print(pd.DataFrame(columns).T.round(1).to_string())
    print_looks()
    print_pairs()
    print_skewed()


if __name__ == "__main__":
    main()
