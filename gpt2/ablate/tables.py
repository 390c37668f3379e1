"""The tables of a sweep's report; every cell is text."""

import math
from collections.abc import Mapping
from statistics import mean, stdev

import numpy as np
import pandas as pd
import scipy  # loads its parts when they are used

from gpt2.ablate.judge import compared
from gpt2.ablate.power import same_difference, welch
from gpt2.ablate.results import amount_to_reach
from gpt2.ablate.runs import describe
from gpt2.ablate.sweep import Sweep
from gpt2.ablate.terms import step_tokens
from gpt2.ablate.verdicts import FOUND, Sample, Verdict


def verdict_table(
    by_arm: Mapping[str, Sample], verdicts: Mapping[str, Verdict]
) -> pd.DataFrame:
    """Returns a row for each arm: its runs, and what they say."""
    rows = []
    for name, sample in by_arm.items():
        scores = list(sample.scores.values())
        middle = f"{mean(scores):.4f}" if scores else "-"
        deviation = f" ± {stdev(scores):.4f}" if len(scores) > 1 else ""
        row = {"arm": name, "runs": f"{len(scores)}", "mean ± sd": middle + deviation}
        if verdict := verdicts.get(name):
            row |= {
                "difference": _number(verdict.difference, "+.4f"),
                "interval": _interval(verdict.low, verdict.high, "+.4f"),
                "p": _number(verdict.p_value, ".2g"),
                "could find": _number(verdict.detectable(), ".4f"),
                "verdict": verdict.words,
            }
        rows.append(row)
    return pd.DataFrame(rows).fillna("")


def sizes_table(sweep: Sweep, verdicts: Mapping[str, Verdict]) -> pd.DataFrame:
    """Returns each change's difference by size and budget, and whether its verdicts agree.

    The p-value, without looks, is that of true differences that are all one, for all changes.
    """
    rows = []
    changes = dict.fromkeys(arm.change for arm in sweep.arms if arm.name in verdicts)
    for change in changes if len(sweep.groups()) > 1 else ():
        row = dict[str, object](arm=change)
        tested = []
        told = set()
        for arm in [arm for arm in sweep.arms if arm.change == change]:
            row[arm.size] = (verdict := verdicts[arm.name]).words
            if interval := _interval(verdict.low, verdict.high, "+.4f"):
                told.add(word := verdict.words if verdict.words in FOUND else "")
                row[arm.size] = f"{verdict.difference:+.4f} {interval} {word}".strip()
                tested.append((verdict.difference, verdict.error, verdict.df))
        alike = len(told) == 1 and len(tested) == len(sweep.groups())
        some = "agree" if alike else "not everywhere"
        row["verdicts"] = "DISAGREE" if told >= set(FOUND) else some
        if (
            len(tested) > 1 and len(sweep.looks) == 1
        ):  # a look ends at differences that seem large
            p_value = len(changes) * float(same_difference(*np.array(tested).T))
            row["p, if one difference"] = float(f"{min(p_value, 1.0):.2g}")
        rows.append(row)
    return pd.DataFrame(rows).fillna("")


def reach_table(sweep: Sweep, results: pd.DataFrame) -> pd.DataFrame:
    """Returns the share of the baseline's run that each arm takes to reach its final score."""
    rows = []
    for baseline, *others in sweep.groups():
        first = compared(results, baseline, "finished")
        for arm in others if len(first) else ():
            row = {"arm": arm.name}
            runs = compared(results, arm, "finished")
            by_step = step_tokens(baseline.config) / step_tokens(arm.config)
            titles = {
                "steps": "tokens",
                "tokens": "tokens",
                "FLOPs": "flops",
                "time": "seconds",
            }
            for title, amount in titles.items():
                unit = first[amount].mean() / (by_step if title == "steps" else 1.0)
                shares = [
                    [
                        amount_to_reach(getattr(curve, amount), curve.scores, score)
                        / unit
                    ]
                    for curve in runs.curve
                    for score in (first.score.mean(), *first.score)
                ]
                row[title] = _share(np.reshape(shares, (len(runs), 1 + len(first))))
            rows.append(row)
    return pd.DataFrame(rows)


def _share(shares: np.ndarray) -> str:
    """Writes the mean of what runs took, and its 95 % interval by Welch's method.

    Rows are an arm's runs, which reach the mean of the baseline's final scores, then each of them.
    """
    reached = np.isfinite(shares).all(1)
    if not reached.all() or shares.size == 0:
        return f"reached by {reached.sum()} of {len(shares)}" if shares.size else "-"
    middle = shares[:, 0].mean()
    targets = shares[:, 1:].mean(0)
    if min(len(shares), len(targets)) < 2:
        return f"{middle:.2f}"
    spreads = np.var(targets, ddof=1), np.var(shares[:, 0], ddof=1)
    error, df = welch(*spreads, len(targets), len(shares))
    half_width = scipy.stats.t.isf(0.025, df) * error
    return f"{middle:.2f} {_interval(middle - half_width, middle + half_width, '.2f')}"


def tuning_table(sweep: Sweep) -> pd.DataFrame:
    """Returns what each arm chose among the values that are tuned."""
    rows = []
    scores = sweep.tuning()
    for name, choice in sweep.chosen.items() if sweep.tune else ():
        if choice is None:
            rows.append({"arm": name, "chosen": "nothing: every choice diverged"})
            continue
        score = next(score for tried, score in scores[name] if tried == choice)
        edges = [
            option
            for option, values in sweep.tune.items()
            if not isinstance(values[0], str)
            and choice[option] in (min(values), max(values))
        ]
        edge = (
            f"at the edge of {', '.join(edges)}: a wider grid may do better"
            if edges
            else ""
        )
        row = {
            "arm": name,
            "chosen": describe(choice),
            "score": f"{score:.4f}",
            "remark": edge,
        }
        rows.append(row)
    return pd.DataFrame(rows).fillna("")


def _number(value: float, form: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else "-"


def _interval(low: float, high: float, form: str) -> str:
    return f"({low:{form}} to {high:{form}})" if math.isfinite(high - low) else ""
