"""Simulate how often a ledger keeps false ideas and true gains: the table of docs/ledger.md.

`python -m tests.programs.ledger_rates` simulates streams of 100 ideas whose scores are normal. An
idea is as good as the best so far, or better by 1, 2, 4 or 8 standard deviations between seeds.
"""

import numpy as np
from scipy import stats

from gpt2.lab.ledger.evidence import evidence, is_futile, level_at

NUM_STREAMS = 1000
NUM_IDEAS = 100
PAIRS = 16
GAINS = np.array([1.0, 2.0, 4.0, 8.0])


def by_evidence(best, idea, number, kept):
    """Return which ideas gpt2.lab.ledger keeps, and after how many pairs, `[streams]`."""
    differences = idea - best
    levels = np.array([level_at(number, each) for each in range(NUM_IDEAS)])[kept]
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


def simulate(rule, share, noisy=0.0, disaster=0.0, num=NUM_STREAMS, seed=0):
    """Return the fraction of false ideas among the kept ideas, and the number of runs, `[num]`.

    The second of the three results is the fraction of the ideas with each of `GAINS` that is kept.
    A fraction `share` of all ideas are gains. A fraction `noisy` of all ideas have three times the
    standard deviation. With `disaster`, each idea is worse by this number at a tenth of the seeds,
    and better at the others, so that its mean does not change.
    """
    rng = np.random.default_rng(seed)
    best = rng.standard_normal((num, PAIRS))
    best_deviation = np.ones((num, 1))
    trained = np.zeros(num, int)  # number of runs of the best
    kept = np.zeros(num, int)
    false = np.zeros(num, int)
    runs = np.zeros(num, int)
    found = np.zeros(len(GAINS))
    tried = np.zeros(len(GAINS))
    for number in range(1, NUM_IDEAS + 1):
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
        runs += pairs + np.maximum(pairs - trained, 0)
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
    return false / np.maximum(kept, 1), found / np.maximum(tried, 1), runs


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
            false, found, runs = simulate(rule, share, *others)
            error = 100 * false.std() / np.sqrt(len(false))
            cells = [f"{100 * false.mean():.1f} ± {error:.1f} %"]
            cells += [f"{100 * each:.0f} %" if share else "" for each in found]
            print(f"| {told} | {name} | {' | '.join(cells)} | {runs.mean():.0f} |")


if __name__ == "__main__":
    main()
