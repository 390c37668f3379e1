"""The tables of a sweep's report; every cell is text."""

import math
from collections.abc import Collection, Mapping
from statistics import mean, stdev

import numpy as np
import pandas as pd
import scipy  # loads its parts when they are used

from gpt2.lab.ablate.judge import compared
from gpt2.lab.ablate.results import AMOUNTS, METRICS, amount_to_reach
from gpt2.lab.ablate.runs import describe
from gpt2.lab.ablate.sweep import Sweep
from gpt2.lab.ablate.verdicts import Sample, Verdict


def verdict_table(
    by_arm: Mapping[str, Sample], verdicts: Mapping[str, Verdict]
) -> pd.DataFrame:
    """Returns a row for each arm: its runs, and what they say."""
    rows = []
    for name, sample in by_arm.items():
        row = {
            "arm": name,
            "runs": str(len(sample.scores)),
            "mean ± sd": spread(sample.scores),
        }
        if name in verdicts:
            verdict = verdicts[name]
            row |= {
                "baseline": number(verdict.baseline, ".4f"),
                "difference": number(verdict.difference, "+.4f"),
                "interval": interval(verdict.low, verdict.high, "+.4f"),
                "p": number(verdict.p_value, ".2g"),
                "could find": number(verdict.detectable(), ".4f"),
                "verdict": verdict.words,
            }
        rows.append(row)
    return pd.DataFrame(rows).fillna("")


def metrics_table(sweep: Sweep, results: pd.DataFrame) -> pd.DataFrame:
    """Returns the last values of all metrics, a row for each; also those that a loss adds."""
    rows = []
    for name in results.columns:
        if name.startswith(METRICS):
            row = {"metric": name}
            for arm in sweep.arms:
                runs = compared(results, arm, "finished")
                row[arm.name] = spread(runs[name].dropna())
            rows.append(row)
    return pd.DataFrame(rows)


def reach_table(sweep: Sweep, results: pd.DataFrame) -> pd.DataFrame:
    """Returns the share of the baseline's run that each arm takes to reach its final score."""
    rows = []
    baseline, *others = sweep.arms
    first = compared(results, baseline, "finished")
    # Of a single validation, at the end, there is no curve.
    if first.empty or len(first.curve.iloc[0].scores) < 2:
        return pd.DataFrame()
    targets = [first.score.mean(), *first.score]
    for arm in others:
        runs = compared(results, arm, "finished")
        row = {"arm": arm.name}
        for amount, title in AMOUNTS.items():
            shares = np.empty((len(runs), len(targets)))
            for i, curve in enumerate(runs.curve):
                amounts = getattr(curve, amount) / first[amount].mean()
                for j, target in enumerate(targets):
                    shares[i, j] = amount_to_reach(amounts, curve.scores, target)
            row[title] = _share(shares)
        rows.append(row)
    return pd.DataFrame(rows)


def _share(shares: np.ndarray) -> str:
    """Writes the mean of what runs took, and its 95 % interval by Welch's method.

    Rows are an arm's runs, which reach the mean of the baseline's final scores, then each of them.
    """
    if not shares.size or np.isnan(shares).any():
        return "-"
    reached = np.isfinite(shares).all(1)
    if not reached.all():
        return f"reached by {reached.sum()} of {len(shares)}"
    own = shares[:, 0]
    targets = shares[:, 1:].mean(0)
    middle = own.mean()
    if min(len(own), len(targets)) < 2:
        return f"{middle:.2f}"
    welch = scipy.stats.ttest_ind(own, targets, equal_var=False)
    ends = welch.confidence_interval(0.95)
    half_width = (ends.high - ends.low) / 2
    told = interval(middle - half_width, middle + half_width, ".2f")
    return f"{middle:.2f} {told}"


def tuning_table(sweep: Sweep, results: pd.DataFrame) -> pd.DataFrame:
    """Returns the score of each choice of values, a row for each, by each arm; * is its best."""
    tried = results[results.purpose == "choose"]
    table = tried.pivot(index="values", columns="arm", values="score")
    table = table.map(number, form=".4f")
    for arm in table.columns.intersection(list(sweep.chosen)):
        table.loc[describe(sweep.chosen[arm]), arm] += "*"
    return table.reset_index()


def spread(scores: Collection[float]) -> str:
    """Writes the mean of scores, and their deviation if there are several."""
    if not len(scores):
        return "-"
    middle = f"{mean(scores):.4f}"
    if len(scores) == 1:
        return middle
    return f"{middle} ± {stdev(scores):.4f}"


def number(value: float, form: str) -> str:
    """Writes a number; `-` if there is none."""
    if math.isfinite(value):
        return f"{value:{form}}"
    return "-"


def interval(low: float, high: float, form: str) -> str:
    """Writes an interval; nothing if there is none."""
    if math.isfinite(high - low):
        return f"({low:{form}} to {high:{form}})"
    return ""
