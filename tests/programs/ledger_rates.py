"""Simulate how often a ledger keeps false ideas and true gains: the tables of docs/ledger.md.

`python -m tests.programs.ledger_rates` simulates streams of 100 ideas whose scores are normal. An
idea is as good as the best so far, or better by 1, 2, 4 or 8 standard deviations between seeds. The
second table has ledgers that screen ideas at a quarter and at half of the depth.
"""

import numpy as np
from scipy import stats

from gpt2.lab.ledger.evidence import SCREEN_PAIRS, evidence, is_futile, level_at

NUM_STREAMS = 1000
NUM_IDEAS = 100
PAIRS = 16
GAINS = np.array([1.0, 2.0, 4.0, 8.0])
SCREENS = (0.25, 0.5)  # the depths of the screens, as fractions of the ledger's depth
# The gain at each screen, as a fraction of the gain at the ledger's size.
EFFECTS = {
    "the same at all sizes": (1.0, 1.0),
    "grows with the depth": SCREENS,
    "only at the largest size": (0.0, 0.0),
}


def by_evidence(best, idea, number, kept):
    """Return which ideas gpt2.lab.ledger keeps, and after how many pairs, `[streams]`."""
    differences = idea - best
    levels = np.vectorize(level_at)(number, kept)
    clear = evidence(differences) >= 1 / levels[:, None]
    clear[:, 0] = False
    hopeless = np.zeros_like(clear)
    for pairs in range(2, PAIRS):
        seen = differences[:, :pairs]
        hopeless[:, pairs - 1] = is_futile(seen, PAIRS, levels)
    ends = clear | hopeless
    ends[:, -1] = True
    last = ends.argmax(1)
    return clear[np.arange(len(last)), last], last + 1


def by_one_run(best, idea, number, kept):
    """Keep ideas whose first run has a lower score than the first run of the best."""
    return idea[:, 0] < best[:, 0], np.ones(len(idea), int)


def by_three_seeds(best, idea, number, kept):
    """Keep ideas that are lower with p < 0.05 in Student's t-test of three seeds."""
    test = stats.ttest_ind(idea[:, :3], best[:, :3], axis=1)
    return (test.pvalue < 0.05) & (test.statistic < 0), np.full(len(idea), 3)


RULES = {
    "one run is lower": by_one_run,
    "p < 0.05, three seeds": by_three_seeds,
    "the ledger": by_evidence,
}


def screen(rng, gain, effect):
    """Return which ideas pass the screens, and the number of runs at each depth."""
    passes = np.ones(len(gain), bool)
    runs = []
    for fraction in effect:
        runs.append(2 * SCREEN_PAIRS * passes)
        best, idea = rng.standard_normal((2, len(gain), SCREEN_PAIRS)).mean(-1)
        passes = passes & (idea - fraction * gain < best)
    return passes, runs


def simulate(
    rule, share, noisy=0.0, disaster=0.0, num=NUM_STREAMS, seed=0, effect=None
):
    """Return the fraction of false ideas among the kept ideas, and the number of runs, `[num]`.

    The second of the four results is the fraction of the ideas with each of `GAINS` that is kept.
    A fraction `share` of all ideas are gains. A fraction `noisy` of all ideas have three times the
    standard deviation. With `disaster`, each idea is worse by this number at a tenth of the seeds,
    and better at the others, so that its mean does not change. With `effect`, one of `EFFECTS`,
    ideas are screened. The fourth result is the number of runs in units of a run of full size.
    """
    rng = np.random.default_rng(seed)
    best = rng.standard_normal((num, PAIRS))
    best_deviation = np.ones((num, 1))
    trained = np.zeros(num, int)  # number of runs of the best
    kept = np.zeros(num, int)
    false = np.zeros(num, int)
    # The position of the next idea that passes the screens.
    number = np.ones(num, int)
    passes = np.ones(num, bool)
    runs = np.zeros(num, int)
    cost = np.zeros(num)
    found = np.zeros(len(GAINS))
    tried = np.zeros(len(GAINS))
    for _ in range(NUM_IDEAS):
        sizes = rng.integers(len(GAINS), size=num)
        is_gain = rng.random(num) < share
        gain = np.where(is_gain, GAINS[sizes], 0.0)
        deviation = np.where(rng.random(num) < noisy, 3.0, 1.0)[:, None]
        if rule is by_evidence:  # each idea has seeds of its own
            best = best_deviation * rng.standard_normal((num, PAIRS))
            trained[:] = 0
        # Scores are differences from the true mean of the best.
        idea = deviation * rng.standard_normal((num, PAIRS)) - gain[:, None]
        if disaster:
            is_bad = rng.random((num, PAIRS)) < 0.1
            idea += np.where(is_bad, disaster, -disaster / 9)
        keep, pairs = rule(best, idea, number, kept)
        if effect:
            passes, small_runs = screen(rng, gain, effect)
            for depth, at_depth in zip(SCREENS, small_runs, strict=True):
                runs += at_depth
                cost += at_depth * depth**6  # parameters and tokens are depth**3
        keep &= passes
        pairs *= passes
        number += passes
        full_runs = pairs + np.maximum(pairs - trained, 0)
        runs += full_runs
        cost += full_runs
        trained = np.where(keep, pairs, np.maximum(trained, pairs))
        kept += keep
        false += keep & ~is_gain
        for size in range(len(GAINS)):
            chosen = is_gain & (sizes == size)
            tried[size] += chosen.sum()
            found[size] += (chosen & keep).sum()
        # If an idea is kept, its runs become the runs of the best, and its missing runs are drawn.
        fresh = deviation * rng.standard_normal((num, PAIRS))
        has_run = np.arange(PAIRS) < pairs[:, None]
        heir = np.where(has_run, idea + gain[:, None], fresh)
        best = np.where(keep[:, None], heir, best)
        best_deviation = np.where(keep[:, None], deviation, best_deviation)
    return false / np.maximum(kept, 1), found / np.maximum(tried, 1), runs, cost


def main():
    cases = {
        "no gains": (0.0, 0.0),
        "no gains, 10 % noisy": (0.0, 0.1),
        "10 % gains": (0.1, 0.0),
        "10 % gains, 10 % noisy": (0.1, 0.1),
        "30 % gains": (0.3, 0.0),
        "no gains, disasters": (0.0, 0.0, 9.0),
    }
    print("| | rule | false | 1 | 2 | 4 | 8 | runs |\n|" + " --- |" * 8)
    for told, (share, *others) in cases.items():
        for name, rule in RULES.items():
            false, found, runs, _ = simulate(rule, share, *others)
            cells = describe(false, found if share else [])
            print(f"| {told} | {name} | {cells} | {runs.mean():.0f} |")
    print("\n| better | the gain is | false | 1 | 2 | 4 | 8 | runs | in large runs |")
    print("|" + " --- |" * 9)
    for share in (0.0, 0.1, 0.3):
        for told, effect in {"no screens": None, **EFFECTS}.items():
            false, found, runs, cost = simulate(by_evidence, share, effect=effect)
            cells = describe(false, found if share else [])
            ends = f"{runs.mean():.0f} | {cost.mean():.0f}"
            print(f"| {100 * share:.0f} % | {told} | {cells} | {ends} |")
            if effect and not share:
                break  # without gains, all effects are the same


def describe(false, found):
    """Return the cells of a row: false ideas in percent, and the ideas found for each gain."""
    error = 100 * false.std() / np.sqrt(len(false))
    cells = [f"{100 * false.mean():.1f} ± {error:.1f} %"]
    cells += [f"{100 * each:.0f} %" for each in found] or [""] * len(GAINS)
    return " | ".join(cells)


if __name__ == "__main__":
    main()
