"""Simulate how often the verdicts of a ladder are wrong or true: the tables of docs/ladder.md.

`python -m tests.programs.ladder_rates` simulates ladders of four sizes with five arms each. Losses
are a power law of compute, optionally plus an irreducible loss, plus normal noise. Runs with the
same seed share a part of the noise.
"""

import math
from collections import Counter

import numpy as np
import pandas as pd

from gpt2.lab.ablate.power import LEVEL
from gpt2.lab.ladder.multipliers import STAYS, Losses, judge_course

NUM_LADDERS = 200
NUM_ARMS = 5
COMPUTE = 10.0 ** np.arange(10, 14)
NOISE = 0.01  # the standard deviation between seeds, in nats
CASES = {  # the multiplier at the smallest size, and its factor for ten times the compute
    "no gain": (1.0, 1.0),
    "a gain of 2": (2.0, 1.0),
    "a gain of 4": (4.0, 1.0),
    "grows by 2": (1.0, 2.0),
    "grows by 3": (1.0, 3.0),
    "fades by 2": (8.0, 1 / 2),
    "fades by 3": (27.0, 1 / 3),
    "flips": (0.5, 2.0),
    "at the limit": (4.0, STAYS),
}
# The verdicts that are true in each case. At the limit of `constant`, every verdict is an error.
TRUE = {
    "no gain": {"constant"},
    "a gain of 2": {"constant"},
    "a gain of 4": {"constant"},
    "grows by 2": {"grows"},
    "grows by 3": {"grows"},
    "fades by 2": {"fades"},
    "fades by 3": {"fades"},
    "flips": {"flips", "grows"},
    "at the limit": set[str](),
}


def power_law(compute):
    """Return mean losses that fall by 11 % for ten times the compute."""
    return 10.0 * compute**-0.05


def with_irreducible(compute):
    """Return mean losses of which no compute removes 1.7 nats."""
    return 1.7 + 3.3 * (compute / COMPUTE[0]) ** -0.155


def draw(rng, loss, first, factor, *, seeds, correlation, ratio):
    """Return the losses of a baseline, and of arms that are `ratio` times as noisy."""
    sizes = len(COMPUTE)
    shared = rng.normal(size=(sizes, seeds))
    multipliers = first * factor ** np.arange(sizes)
    ladders = []
    for arm in range(1 + NUM_ARMS):
        own = rng.normal(size=(sizes, seeds))
        noise = NOISE * (
            math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own
        )
        effective = COMPUTE * multipliers if arm else COMPUTE
        if arm:
            noise = noise * ratio
        scores = loss(effective)[:, None] + noise
        ladders.append([Losses(c, s) for c, s in zip(COMPUTE, scores, strict=True)])
    return ladders


def simulate(
    case, *, seeds, correlation, loss=power_law, ratio=1.0, ladders=NUM_LADDERS
):
    """Return the fractions of ladders with a wrong verdict, and of arms with a true verdict."""
    rng = np.random.default_rng(0)
    wrong = 0
    words = Counter()
    for _ in range(ladders):
        baseline, *arms = draw(
            rng, loss, *CASES[case], seeds=seeds, correlation=correlation, ratio=ratio
        )
        level = LEVEL / NUM_ARMS
        courses = [judge_course(baseline, arm, level=level).words for arm in arms]
        words.update(courses)
        wrong += any(word not in {*TRUE[case], "undecided"} for word in courses)
    found = sum(words[word] for word in TRUE[case])
    return wrong / ladders, found / (ladders * NUM_ARMS)


def main():
    """Print a row for each case and number of seeds."""
    print(f"constant: within a factor of {STAYS} for ten times the compute")
    rows = []
    for case in CASES:
        for seeds in (3, 5):
            row = {"case": case, "seeds": seeds}
            for name, loss in ("power", power_law), ("E > 0", with_irreducible):
                for correlation in (0.0, 0.9):
                    wrong, found = simulate(
                        case, seeds=seeds, correlation=correlation, loss=loss
                    )
                    row[f"wrong, {name}, {correlation}"] = f"{wrong:.1%}"
                    row[f"found, {name}, {correlation}"] = f"{found:.0%}"
            wrong, found = simulate(case, seeds=seeds, correlation=0.5, ratio=3.0)
            row["wrong, noisy arms"] = f"{wrong:.1%}"
            rows.append(row)
    print(pd.DataFrame(rows).to_string(index=False))


if __name__ == "__main__":
    main()
