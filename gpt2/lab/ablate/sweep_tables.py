"""The tables in a sweep's report. All cells are strings."""

import math
from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import pandas as pd
import scipy  # its submodules are imported when they are used

from gpt2.lab.ablate.judge import compared
from gpt2.lab.ablate.sweep import Sweep
from gpt2.lab.ablate.verdicts import ArmScores, Verdict
from gpt2.lab.experiments.cells import interval, number, spread
from gpt2.lab.experiments.results import AMOUNTS, METRICS
from gpt2.lab.experiments.run_folder import describe


def verdict_table(
    by_arm: Mapping[str, ArmScores], verdicts: Mapping[str, Verdict]
) -> pd.DataFrame:
    """Return a table of strings with a row for each arm: its scores and its verdict.

    `by_arm` maps the baseline, which is first, and each arm to the results of its runs. If an arm
    is not in `verdicts`, such as the baseline, only the cells for its verdict are empty.
    """
    rows = []
    baselines = next(iter(by_arm.values())).scores
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
                "pairs": str(verdict.pairs),
                "correlation": number(sample.scores.corr(baselines), ".2f"),
                "detectable": number(verdict.detectable(), ".4f"),
                "verdict": verdict.words,
            }
        rows.append(row)
    return pd.DataFrame(rows).fillna("")


def metrics_table(sweep: Sweep, results: pd.DataFrame) -> pd.DataFrame:
    """Return a table of the last value of each metric that runs log, such as `eval/loss`.

    There is a row for each metric and a column for each arm. Cells are means and standard
    deviations over the arm's finished runs. `results` is the table of all runs that `read_results`
    returns.
    """
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
    """Return a table of how soon each arm reaches the baseline's final score.

    There is a row for each arm except the baseline, and a column each for tokens, FLOPs and
    seconds. A cell is the fraction of the baseline's amount that the arm needs; see
    `describe_fractions`. `results` is the table of all runs that `read_results` returns. The table
    is empty if no run of the baseline has finished, or if its runs have only one validation.
    """
    rows = []
    baseline, *others = sweep.arms
    first = compared(results, baseline, "finished")
    # A single validation at the end of a run is not a curve.
    if first.empty or len(first.curve.iloc[0].scores) < 2:
        return pd.DataFrame()
    targets = [first.score.mean(), *first.score]
    for arm in others:
        runs = compared(results, arm, "finished")
        row = {"arm": arm.name}
        for amount, title in AMOUNTS.items():
            fractions = np.empty((len(runs), len(targets)))
            for i, curve in enumerate(runs.curve):
                amounts = getattr(curve, amount) / first[amount].mean()
                for j, target in enumerate(targets):
                    fractions[i, j] = amount_to_reach(amounts, curve.scores, target)
            row[title] = describe_fractions(fractions)
        rows.append(row)
    return pd.DataFrame(rows)


def amount_to_reach(amounts: np.ndarray, scores: np.ndarray, target: float) -> float:
    """Return the amount after which a curve stays below `target`, interpolated linearly.

    `amounts` are the tokens, FLOPs or seconds at the validations, in any unit. Return inf if the
    curve ends above `target`, and the amount at the first validation if the curve is never above
    `target`.
    """
    # The last validation above the target decides. An earlier validation below it may be luck.
    above = np.flatnonzero(scores > target)
    start = above[-1] if above.size else 0
    x = -scores[start : start + 2]
    y = amounts[start : start + 2]
    return float(np.interp(-target, x, y, right=math.inf))


def describe_fractions(fractions: np.ndarray) -> str:
    """Return the mean fraction and its 95 % interval (Welch's method) as a string.

    `fractions` is an array `[runs of the arm, 1 + runs of the baseline]`. An element is the amount
    (tokens, FLOPs or seconds) after which a run of the arm reaches a target score, divided by the
    mean amount of the baseline's whole runs. The target of the first column is the mean of the
    baseline's final scores, and the target of each other column is one of these scores. An element
    is inf if the run does not reach the target. If any element is inf, return how many runs reach
    all targets. If an element is NaN, or there are no runs, return `-`.
    """
    if not fractions.size or np.isnan(fractions).any():
        return "-"
    reached = np.isfinite(fractions).all(1)
    if not reached.all():
        return f"reached by {reached.sum()} of {len(fractions)}"
    by_run = fractions[:, 0]
    by_target = fractions[:, 1:].mean(0)
    middle = by_run.mean()
    if min(len(by_run), len(by_target)) < 2:
        return f"{middle:.2f}"
    welch = scipy.stats.ttest_ind(by_run, by_target, equal_var=False)
    ends = welch.confidence_interval(0.95)
    half_width = (ends.high - ends.low) / 2
    ends_text = interval(middle - half_width, middle + half_width, ".2f")
    return f"{middle:.2f} {ends_text}"


def tuning_table(sweep: Sweep, results: pd.DataFrame) -> pd.DataFrame:
    """Return a table of the tuning runs' mean scores.

    There is a row for each combination of values and a column for each arm. A * marks the chosen
    values of an arm. `results` is the table of all runs that `read_results` returns.
    """
    runs = results[results.purpose == "choose"]
    scores = runs.groupby(["values", "arm"]).score
    means = scores.agg(lambda values: values.mean(skipna=False))
    table = means.unstack().map(number, form=".4f")
    for arm in table.columns.intersection(list(sweep.chosen)):
        table.loc[describe(sweep.chosen[arm]), arm] += "*"
    return table.reset_index()


def tuning_notes(sweep: Sweep) -> list[str]:
    """Return a sentence for each chosen value that is the smallest or the largest value tried.

    A value beyond the values tried may be better. If a run of an arm diverged with every value,
    return a sentence that states this instead.
    """
    notes = []
    tuning = sweep.tuning_runs()
    for arm, choice in sweep.chosen.items():
        runs = [run for run in tuning if run.arm == arm and run.tuned == choice]
        if any(run.outcome().state == "diverged" for run in runs):
            notes.append(
                f"A run of {arm} diverged with every value in --tune, so the first value is used."
                " Other values may be better."
            )
            continue
        listed = defaultdict[str, set](set)
        for axis in sweep.tune:
            for settings in axis:
                for name, value in settings.items():
                    listed[name].add(value)
        for name, values in listed.items():
            chosen = choice.get(name)
            if type(chosen) not in (int, float) or len(values) == 1:
                continue
            if chosen == min(values):
                which = "smallest"
                further = "smaller"
            elif chosen == max(values):
                which = "largest"
                further = "larger"
            else:
                continue
            notes.append(
                f"The best {name} of {arm}, {chosen}, is the {which} value tried. A {further} value"
                f" may be better: start a new sweep with {further} values in --tune."
            )
    return notes
