"""How often verdicts are false, and how often true: the figures of gpt2/lab/ablate and its page.

`python -m tests.programs.verdict_rates` simulates sweeps of five arms whose scores are normal.
The rules are written again here, for many sweeps at once.
"""

import itertools
import math

import numpy as np
import pandas as pd
from scipy import stats

from gpt2.lab.ablate.judge import is_futile, level_at
from gpt2.lab.ablate.power import dunnett_quantile, welch

NUM_SWEEPS = 40_000
NUM_ARMS = 5
OUTLYING = (
    10  # times the median variance, above which an arm is left out of the others' pool
)
CHUNK = 10_000  # sweeps at once
LOOKS = (3, 5, 8)
NOISY = {
    "equal": (1.0,) * 6,
    "baseline": (3.0,) + (1.0,) * 5,
    "one arm": (1.0, 3.0) + (1.0,) * 4,
}


def draw(rng, sizes, deviations, shift=0.0):
    """Returns the scores of a baseline and of each arm, `[CHUNK, runs]`; the first is shifted."""
    return [
        rng.normal(shift if i == 1 else 0.0, deviation, (CHUNK, size))
        for i, (size, deviation) in enumerate(zip(sizes, deviations, strict=True))
    ]


def moments(scores):
    """Returns means and variances, `[CHUNK, 1 + arms]`."""
    means, variances = zip(
        *((each.mean(1), each.var(1, ddof=1)) for each in scores), strict=True
    )
    return np.stack(means, 1), np.stack(variances, 1)


def dunnett(means, variances, sizes, *, drop=False, level=0.05):
    """Returns which arms differ by Dunnett's test, `[CHUNK, arms]`; `drop`: without outlying."""
    dfs = np.array(sizes) - 1
    counts = variances <= OUTLYING * np.median(variances, 1, keepdims=True)
    found = np.empty((len(means), len(sizes) - 1), bool)
    in_order = (sizes[0], *sorted(sizes[1:]))
    for i in range(1, len(sizes)):
        counted = counts.copy() if drop else np.ones_like(counts)
        counted[:, [0, i]] = True
        df = (counted * dfs).sum(1)
        pooled = np.sqrt((counted * dfs * variances).sum(1) / df)
        error = pooled * math.sqrt(1 / sizes[0] + 1 / sizes[i])
        quantiles = {
            each: dunnett_quantile(in_order, level, int(each)) for each in set(df)
        }
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


def both(means, variances, sizes, level=0.05):
    """Returns which arms differ by the rule of gpt2/lab/ablate/verdicts.py."""
    alone = welch_alone(means, variances, sizes, level / math.sqrt(len(sizes) - 1))
    return dunnett(means, variances, sizes, drop=True, level=level) & alone


RULES = {"Dunnett alone": dunnett, "Welch alone, Šidák's level": sidak, "both": both}


def rates(sizes, deviations, shift=0.0, num=NUM_SWEEPS):
    """Returns in how many percent of sweeps each rule finds anything, or a shifted arm."""
    rng = np.random.default_rng(0)
    counts = dict.fromkeys(RULES, 0)
    for _ in range(num // CHUNK):
        drawn = moments(draw(rng, sizes, deviations, shift))
        for name, rule in RULES.items():
            found = rule(*drawn, sizes)
            counts[name] += int((found[:, 0] if shift else found.any(1)).sum())
    return {name: 100 * count / num for name, count in counts.items()}


def draw_looks(deviations, shifts=(), num=CHUNK, seed=0):
    """Returns the scores of a baseline and arms, `[num, seeds of the last look, 1 + arms]`.

    `shifts`, of the first arms, are in standard errors of as many seeds.
    """
    rng = np.random.default_rng(seed)
    num_seeds = LOOKS[-1]
    scores = deviations * rng.standard_normal((num, num_seeds, len(deviations)))
    scores[..., 1 : 1 + len(shifts)] += np.array(shifts) * math.sqrt(2 / num_seeds)
    return scores


def look_at(scores, looks=LOOKS):
    """Returns which arms looks find, `[num, arms]`, and how many runs each sweep trains."""
    num = len(scores)
    arms = scores.shape[2] - 1
    seeds = np.zeros((num, 1 + arms), int)
    going = np.ones((num, arms), bool)
    found = np.zeros_like(going)
    for look in looks:
        goes = going.any(1)
        seeds[:, 1:][going] = seeds[goes, 0] = look
        for sizes in np.unique(seeds[goes], axis=0).tolist():
            rows = np.flatnonzero((seeds == sizes).all(1) & goes)
            means, variances = moments(
                [scores[rows, :n, i] for i, n in enumerate(sizes)]
            )
            clear = both(means, variances, sizes, level_at(looks, look))
            found[rows] |= clear & going[rows]
            going[rows] &= ~clear
            if look < looks[-1]:
                distances = np.abs(means[:, 1:] - means[:, :1])
                errors, _ = welch(
                    variances[:, :1], variances[:, 1:], sizes[0], np.array(sizes[1:])
                )
                going[rows] &= ~is_futile(distances / errors, arms, looks, look)
    return found, seeds.sum(1)


def told(found):
    """Returns in how many sweeps anything is found, with the 95 % interval."""
    count = int(found.reshape(len(found), -1).any(1).sum())
    low, high = stats.binomtest(count, len(found)).proportion_ci(method="exact")
    return f"{count / len(found):.1%} ({low:.1%} to {high:.1%})"


def print_looks():
    """Prints how often looks find something, true or false."""
    for (name, deviations), shifts in itertools.product(
        NOISY.items(), ((), (2.0, 4.0, 6.0, 12.0))
    ):
        scores = draw_looks(deviations, shifts)
        for looks in (LOOKS, LOOKS[-1:]):
            found, runs = look_at(scores, looks)
            rates = [told(found[:, i]) for i in range(len(shifts))] or told(found)
            print(
                f"{looks}, {name}, arms off by {shifts}: {rates}, {runs.mean():.1f} runs"
            )


def main():
    columns = {}
    for (name, deviations), num in itertools.product(NOISY.items(), (3, 5)):
        columns[f"{name} n={num}"] = rates((num,) * 6, deviations)
    for num in (3, 5):
        columns[f"found n={num}"] = rates(
            (num,) * 6, NOISY["equal"], 5 * math.sqrt(2 / num)
        )
    worst = {"alike": dict.fromkeys(RULES, 0.0), "others": dict.fromkeys(RULES, 0.0)}
    for arms, num, first in itertools.product((1, 2, 5, 10), (3, 5), (3, 5, 10)):
        for noisy_arms in sorted({0, 1, arms // 2, arms}):
            for deviation in (1.0, 3.0):
                deviations = (
                    deviation,
                    *[3.0] * noisy_arms,
                    *[1.0] * (arms - noisy_arms),
                )
                found = worst["alike" if num == first else "others"]
                sizes = (first,) + (num,) * arms
                for name, rate in rates(sizes, deviations, num=20_000).items():
                    found[name] = max(found[name], rate)
    columns |= {f"worst, {kind}": found for kind, found in worst.items()}
    print(pd.DataFrame(columns).T.round(1).to_string())
    print_looks()


if __name__ == "__main__":
    main()
