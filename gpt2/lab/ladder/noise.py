"""The noise between seeds at each size of a ladder, and how many pairs detect a gain.

A pair is a run of an arm and a run of the baseline with the same seed.
"""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from gpt2.lab.ablate.judge import compared
from gpt2.lab.ablate.power import LEVEL, POWER, Array, paired_difference
from gpt2.lab.ablate.sweep import Sweep
from gpt2.lab.experiments.cells import number
from gpt2.lab.ledger.evidence import MOST_PAIRS, findable, level_at
from gpt2.utils.text import format_count, format_duration

_MOST_PAIRS = 1000  # largest number of pairs that a plan considers for a sweep


def measure_noise(
    sweeps: Sequence[Sweep], results: Sequence[pd.DataFrame]
) -> pd.DataFrame:
    """Return a row for each size: what a run costs, and how much losses differ between seeds.

    `sweeps` contains the sweep of each size, and `results` contains, for each size, the table that
    `read_results` returns. The column `compute` contains the baseline's FLOPs or, with
    `--equal=seconds`, the baseline's seconds of training steps. `loss` is the mean of the
    baseline's losses, and `seed` is their standard deviation. `pair` is the standard deviation of
    the difference between an arm and the baseline with the same seed or, with several arms, the
    root mean square of these standard deviations. `loss`, `seed` and `pair` are in the unit of the
    sweep's score.
    """
    rows = []
    for sweep, table in zip(sweeps, results, strict=True):
        baseline, *arms = sweep.arms
        runs = compared(table, baseline, "finished").set_index("seed")
        differences = []
        for arm in arms:
            scores = compared(table, arm, "finished").set_index("seed").score
            # The variance is NaN with fewer than two pairs.
            differences.append((scores - runs.score).var())
        row = {
            "size": sweep.root.name,
            "flops": runs.flops.mean(),
            "compute": runs[sweep.amount].mean(),
            "seconds": runs.seconds.mean(),
            "loss": runs.score.mean(),
            "seed": runs.score.std(),
            "pair": math.sqrt(pd.Series(differences).mean()),
        }
        rows.append(row)
    return pd.DataFrame(rows)


def gains(noise: pd.DataFrame, multiplier: float) -> Array:
    """Return how far the loss falls at each size if compute grows by the factor `multiplier`.

    `noise` is the table of `measure_noise`. Around each size, the baseline's loss is assumed to be
    a power law of compute. The exponent is the slope of the parabola through this size and its
    nearest sizes, in log loss against log compute.
    """
    slopes = np.gradient(np.log(noise.loss), np.log(noise.compute), edge_order=2)
    return (noise.loss * (1 - multiplier**slopes)).to_numpy()


def sweep_pairs(effect: float) -> float:
    """Return how many pairs of runs a paired sweep of one arm needs to find a difference.

    With this number, 4 of 5 such sweeps would find the difference. `effect` is the true difference,
    divided by the standard deviation of a pair's difference. Return inf if 1,000 pairs are too few.
    """
    for pairs in range(2, _MOST_PAIRS + 1):
        if paired_difference(1 / math.sqrt(pairs), pairs - 1, LEVEL) <= effect:
            return pairs
    return math.inf


def ledger_pairs(effect: float) -> float:
    """Return how many pairs of runs a ledger needs to accept its first idea.

    With this number, 4 of 5 ledgers would accept an idea with the effect `effect`. An effect is an
    idea's true gain over the best version, divided by the standard deviation of a pair's
    difference. Return inf if a ledger's default of 16 pairs is too small.
    """
    enough = np.flatnonzero(findable(MOST_PAIRS, level_at(1, 0), POWER) <= effect)
    return enough[0] + 1 if len(enough) else math.inf


def plan_pairs(noise: pd.DataFrame, multiplier: float, unit: str) -> pd.DataFrame:
    """Return a table of strings: how many pairs are needed to detect a compute multiplier.

    There is a row for each size. `noise` is the table of `measure_noise`, and `unit` is the unit of
    its losses.
    """
    table = noise.assign(gain=gains(noise, multiplier))
    effects = table.gain / table.pair
    table["pairs"] = effects.map(sweep_pairs)
    table["ledger"] = effects.map(ledger_pairs)
    cost = (table.pairs * table.compute).replace(math.inf, math.nan)
    rows = []
    for size in table.itertuples():
        row = {
            "size": size.size,
            f"gain ({unit})": number(size.gain, ".4f"),
            "pairs in a sweep": "-",
            "FLOPs": "-",
            "training time": "-",
            "pairs in a ledger": "-",
        }
        # False if a value is NaN, because runs have not finished.
        if size.gain > 0 and size.pair >= 0:
            row["pairs in a sweep"] = f"over {_MOST_PAIRS}"
            row["pairs in a ledger"] = f"over {MOST_PAIRS}"
        if math.isfinite(size.pairs):
            row["pairs in a sweep"] = f"{size.pairs:.0f}"
            row["FLOPs"] = format_count(2 * size.pairs * size.flops)
            row["training time"] = format_duration(2 * size.pairs * size.seconds)
        if math.isfinite(size.ledger):
            row["pairs in a ledger"] = f"{size.ledger:.0f}"
        if cost[size.Index] == cost.min():  # False for NaN
            row["size"] += ", cheapest"
        rows.append(row)
    return pd.DataFrame(rows)
