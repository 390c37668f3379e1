"""The tables of a sweep's report; every cell is text."""

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev, variance

import pandas as pd
import scipy  # loads its parts when they are used

from gpt2.ablate.arms import Arm
from gpt2.ablate.power import deviation_interval, ratio_interval, seeds_needed
from gpt2.ablate.results import amount_to_reach, log_amount_per_score
from gpt2.ablate.runs import describe
from gpt2.ablate.scaling import compute_to_match, fit_power_law
from gpt2.ablate.sweep import Sweep
from gpt2.ablate.verdicts import Sample, Verdict, compare
from gpt2.utils.text import format_count

_SEEDS_FOR_NOISE = 5
AMOUNTS = {"tokens": "tokens", "flops": "FLOPs", "seconds": "time"}


def samples(sweep: Sweep, results: pd.DataFrame) -> dict[str, Sample]:
    """Returns the final scores of each arm."""
    by_arm = {}
    for arm in sweep.arms:
        rows = compared(results, arm)
        scores = rows[rows.state == "finished"].set_index("seed").score.to_dict()
        counts = {state: int((rows.state == state).sum()) for state in ("diverged", "failed")}
        by_arm[arm.name] = Sample(scores, **counts)
        if sweep.chosen.get(arm.name, {}) is None:  # it diverged with every choice
            by_arm[arm.name] = Sample({}, diverged=len(sweep.choices()))
    return by_arm


def judge(sweep: Sweep, results: pd.DataFrame) -> dict[str, Verdict]:
    """Returns the verdict on each arm but the baselines, size by size."""
    by_arm = samples(sweep, results)
    verdicts: dict[str, Verdict] = {}
    for baseline, *others in sweep.groups():
        arms = {arm.name: by_arm[arm.name] for arm in others}
        verdicts |= compare(by_arm[baseline.name], arms, paired=sweep.paired)
    return verdicts


def verdict_table(
    sweep: Sweep, by_arm: Mapping[str, Sample], verdicts: Mapping[str, Verdict]
) -> pd.DataFrame:
    """Returns a row for each arm: its runs, and what they say."""
    rows = []
    for arm in (arm for group in sweep.groups() for arm in group):
        scores = list(by_arm[arm.name].scores.values())
        deviation = f" ± {stdev(scores):.4f}" if len(scores) > 1 else ""
        row = {
            "arm": arm.name,
            "runs": f"{len(scores)}",
            "mean ± sd": f"{mean(scores):.4f}{deviation}" if scores else "-",
        }
        if verdict := verdicts.get(arm.name):
            row |= {
                "difference": _number(verdict.difference, "+.4f"),
                "95 % interval": _interval(verdict.low, verdict.high, "+.4f"),
                "p": _number(verdict.p_value, ".2g"),
                "could find": _number(verdict.detectable, ".4f"),
                "verdict": verdict.words,
            }
        rows.append(row)
    return pd.DataFrame(rows).fillna("")


def noise_table(sweep: Sweep, by_arm: Mapping[str, Sample]) -> pd.DataFrame:
    """Returns how much seeds matter; empty where there are too few to tell.

    For each arm: the standard deviation over its seeds, the correlation with its baseline's runs of
    the same seeds, and how many seeds would find a difference of 0.01 by the sweep's own test.
    """
    rows = []
    for baseline, *others in sweep.groups():
        for arm in (baseline, *others):
            scores = by_arm[arm.name].scores
            if len(scores) < _SEEDS_FOR_NOISE:
                continue
            deviation = stdev(scores.values())
            spread = _interval(*deviation_interval(list(scores.values())), ".4f")
            row = {"arm": arm.name, "runs": str(len(scores)), "sd": f"{deviation:.4f} {spread}"}
            first = by_arm[baseline.name].scores
            pairs = [(first[seed], scores[seed]) for seed in scores if seed in first]
            has_pairs = arm != baseline and len(pairs) >= _SEEDS_FOR_NOISE
            if has_pairs:
                correlation = scipy.stats.pearsonr(*zip(*pairs, strict=True))
                ends = correlation.confidence_interval()
                span = _interval(ends.low, ends.high, "+.2f")
                row["correlation by seed"] = f"{correlation.statistic:+.2f} {span}"
            if sweep.paired:
                deviation = stdev(b - a for a, b in pairs) if has_pairs else 0.0
            if deviation:
                needed = seeds_needed(
                    0.01 / deviation, num_arms=max(1, len(others)), paired=sweep.paired
                )
                row["seeds to find 0.01"] = str(needed)
            rows.append(row)
    columns = ["arm", "runs", "sd", "correlation by seed", "seeds to find 0.01"]
    return pd.DataFrame(rows, columns=columns).fillna("")


def reach_table(sweep: Sweep, results: pd.DataFrame) -> pd.DataFrame:
    """Returns what each arm takes to reach its baseline's final score; empty if nothing is known.

    The shares are of what the baseline takes in the whole run.
    """
    rows = []
    for baseline, *others in sweep.groups():
        reference = compared(results, baseline, "finished")
        if reference.empty:
            continue
        target, target_variance = mean(reference.score), _variance_of_mean(reference.score)
        for arm in others:
            members = compared(results, arm, "finished").curve
            diverged = len(compared(results, arm, "diverged"))
            row = {"arm": arm.name, "loss to reach": f"{target:.4f}"}
            for amount, title in AMOUNTS.items():
                wholes = reference[amount]
                curves = [(getattr(curve, amount), curve.scores) for curve in members]
                shares = [amount_to_reach(*curve, target) / mean(wholes) for curve in curves]
                # The target is the mean of few runs, and so is what the baseline takes.
                slopes = [log_amount_per_score(*curve, target) for curve in curves]
                uncertain = (
                    mean(slopes or [math.nan]) ** 2 * target_variance,
                    _variance_of_mean([math.log(whole) for whole in wholes if whole > 0]),
                )
                noise = [(square, len(reference) - 1) for square in uncertain]
                row[title] = describe_share([*shares, *[math.inf] * diverged], noise)
            rows.append(row)
    return pd.DataFrame(rows)


def describe_share(shares: Sequence[float], noise: Sequence[tuple[float, int]]) -> str:
    """Writes the mean of what runs took, with its interval; arguments as for `ratio_interval`."""
    if not shares:
        return "-"
    if missed := shares.count(math.inf):
        return f"reached by {len(shares) - missed} of {len(shares)}"
    if any(map(math.isnan, shares)):
        return "before the first validation"
    middle, low, high = ratio_interval(shares, noise)
    return f"{middle:.2f} {_interval(low, high, '.2f')}".strip()


def tuning_table(sweep: Sweep) -> pd.DataFrame:
    """Returns what each arm chose among the values that are tuned."""
    rows, scores = [], sweep.tuning()
    for name, choice in sweep.chosen.items() if sweep.tune else ():
        if choice is None:
            rows.append({"arm": name, "chosen": "nothing: every choice diverged"})
            continue
        score = next(score for tried, score in scores[name] if tried == choice)
        edges = [
            option
            for option, values in sweep.tune.items()
            if all(isinstance(value, int | float) for value in values)
            and choice[option] in (min(values), max(values))
        ]
        edge = f"at the edge of {', '.join(edges)}: a wider grid may do better" if edges else ""
        row = {"arm": name, "chosen": describe(choice), "score": f"{score:.4f}", "remark": edge}
        rows.append(row)
    return pd.DataFrame(rows).fillna("")


def broken_table(results: pd.DataFrame) -> pd.DataFrame:
    """Returns the runs that diverged or failed, and why; empty if none did."""
    rows = results[results.state.isin(["diverged", "failed"])]
    return rows[["run", "state", "steps", "error"]].astype(str).rename(columns={"error": "why"})


Points = Mapping[str, Sequence[tuple[float, float]]]


def scaling_points(sweep: Sweep, results: pd.DataFrame) -> Points:
    """Returns (FLOPs, final score) of the finished runs, by change.

    A change without a finished run at some size is skipped.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    lacking = set()
    for arm in sweep.arms:
        rows = compared(results, arm, "finished")
        points.setdefault(arm.change, []).extend(zip(rows.flops, rows.score, strict=True))
        lacking |= {arm.change} if rows.empty else set()
    return {change: each for change, each in points.items() if change not in lacking}


def scaling_table(sweep: Sweep, points: Points) -> pd.DataFrame:
    """Returns the power law of each change, and what it saves of the baseline's compute."""
    rows, baseline = [], sweep.arms[0].change
    laws = {change: fit_power_law(*zip(*runs, strict=True)) for change, runs in points.items()}
    for change, fit in laws.items():
        runs, share = points[change], ""
        if baseline in laws and change != baseline:
            largest = max(flops for flops, _ in points[baseline])
            middle, low, high = compute_to_match(laws[baseline], fit, largest)
            share = f"{_number(middle, '.2f')} {_interval(low, high, '.2f')}"
        misfit = f", p = {fit.p_misfit:.2g}" if math.isfinite(fit.p_misfit) else ""
        rows.append(
            {
                "arm": change,
                "runs": f"{len(runs)}",
                "FLOPs": f"{format_count(min(runs)[0])} to {format_count(max(runs)[0])}",
                "exponent": f"{-fit.slope:.4f} ± {fit.error:.4f}",
                "off the law": f"{math.expm1(fit.farthest):.1%}{misfit}",
                "compute for the baseline's loss": share,
            }
        )
    return pd.DataFrame(rows)


def compared(results: pd.DataFrame, arm: Arm, state: str = "") -> pd.DataFrame:
    """Returns the rows of an arm's runs that are compared, or of those that ended in a state."""
    rows = results[(results.arm == arm.name) & (results.purpose == "compare")]
    return rows[rows.state == state] if state else rows


def _variance_of_mean(values: Sequence[float]) -> float:
    return variance(values) / len(values) if len(values) > 1 else 0.0


def _number(value: float, form: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else "-"


def _interval(low: float, high: float, form: str) -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return ""
    return f"({_number(low, form)} to {_number(high, form)})"
