"""How often verdicts are false, and how often true: the table of gpt2/ablate/verdicts.py.

`python -m tests.verdict_rates` simulates sweeps of five arms whose scores are normal.
The rules are written again here, for many sweeps at once.
"""

import itertools
import math

import numpy as np
from scipy import stats

from gpt2.ablate.power import dunnett_quantile, welch

NUM_SWEEPS = 40_000
NUM_ARMS = 5
OUTLYING = 10  # times the median variance, above which an arm is left out of the others' pool
CHUNK = 10_000  # sweeps at once


def draw(rng, sizes, deviations, shift=0.0):
    """Returns the scores of a baseline and of each arm, `[CHUNK, runs]`; the first is shifted."""
    return [
        rng.normal(shift if i == 1 else 0.0, deviation, (CHUNK, size))
        for i, (size, deviation) in enumerate(zip(sizes, deviations, strict=True))
    ]


def moments(scores):
    """Returns means and variances, `[CHUNK, 1 + arms]`."""
    means, variances = zip(*((each.mean(1), each.var(1, ddof=1)) for each in scores), strict=True)
    return np.stack(means, 1), np.stack(variances, 1)


def dunnett(means, variances, sizes, *, drop=False):
    """Returns which arms differ by Dunnett's test, `[CHUNK, arms]`; `drop`: without outlying."""
    dfs = np.array(sizes) - 1
    counts = variances <= OUTLYING * np.median(variances, 1, keepdims=True)
    found = np.empty((len(means), len(sizes) - 1), bool)
    for i in range(1, len(sizes)):
        counted = counts.copy() if drop else np.ones_like(counts)
        counted[:, [0, i]] = True
        df = (counted * dfs).sum(1)
        pooled = np.sqrt((counted * dfs * variances).sum(1) / df)
        error = pooled * math.sqrt(1 / sizes[0] + 1 / sizes[i])
        quantiles = {each: dunnett_quantile(tuple(sizes), int(each)) for each in set(df)}
        bound = np.vectorize(quantiles.get)(df) * error
        found[:, i - 1] = np.abs(means[:, i] - means[:, 0]) > bound
    return found


def welch_alone(means, variances, sizes, level):
    """Returns which arms differ by Welch's t-test at a level."""
    found = []
    for i in range(1, len(sizes)):
        error, df = welch(variances[:, 0], variances[:, i], sizes[0], sizes[i])
        bound = stats.t.isf(level / 2, df) * error
        found.append(np.abs(means[:, i] - means[:, 0]) > bound)
    return np.stack(found, 1)


def sidak(means, variances, sizes):
    """Returns which arms differ by Welch's test at Šidák's level."""
    return welch_alone(means, variances, sizes, 1 - 0.95 ** (1 / (len(sizes) - 1)))


def both(means, variances, sizes):
    """Returns which arms differ by the rule of gpt2/ablate/verdicts.py."""
    level = 0.05 / math.sqrt(len(sizes) - 1)
    return dunnett(means, variances, sizes, drop=True) & welch_alone(means, variances, sizes, level)


RULES = {"Dunnett alone": dunnett, "Welch alone, Šidák's level": sidak, "both": both}


def rates(sizes, deviations, shift=0.0, num=NUM_SWEEPS):
    """Returns in how many percent of sweeps each rule finds anything, or a shifted arm."""
    rng, counts = np.random.default_rng(0), dict.fromkeys(RULES, 0)
    for _ in range(num // CHUNK):
        drawn = moments(draw(rng, sizes, deviations, shift))
        for name, rule in RULES.items():
            found = rule(*drawn, sizes)
            counts[name] += int((found[:, 0] if shift else found.any(1)).sum())
    return {name: 100 * count / num for name, count in counts.items()}


def main():
    noisy = {
        "equal": (1.0,) * 6,
        "baseline": (3.0,) + (1.0,) * 5,
        "one arm": (1.0, 3.0) + (1.0,) * 4,
    }
    columns = {}
    for (name, deviations), num in itertools.product(noisy.items(), (3, 5)):
        columns[f"{name} n={num}"] = rates((num,) * 6, deviations)
    for num in (3, 5):
        columns[f"found n={num}"] = rates((num,) * 6, noisy["equal"], 5 * math.sqrt(2 / num))
    worst = {"alike": dict.fromkeys(RULES, 0.0), "others": dict.fromkeys(RULES, 0.0)}
    for arms, num, first in itertools.product((1, 2, 5, 10), (3, 5), (3, 5, 10)):
        for noisy_arms in sorted({0, 1, arms // 2, arms}):
            for deviation in (1.0, 3.0):
                deviations = (deviation, *[3.0] * noisy_arms, *[1.0] * (arms - noisy_arms))
                found = worst["alike" if num == first else "others"]
                sizes = (first,) + (num,) * arms
                for name, rate in rates(sizes, deviations, num=20_000).items():
                    found[name] = max(found[name], rate)
    columns |= {f"worst, {kind}": found for kind, found in worst.items()}
    for name in RULES:
        print(f"{name:34}" + " ".join(f"{rate[name]:5.1f}" for rate in columns.values()))
    print("columns: " + ", ".join(columns))


if __name__ == "__main__":
    main()
