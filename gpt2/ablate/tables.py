"""The tables of a sweep's report, as Markdown."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev, variance

import scipy  # loads its parts when they are used

from gpt2.ablate.power import deviation_interval, ratio_interval, seeds_needed
from gpt2.ablate.results import Result, amount_to_reach, log_amount_per_score
from gpt2.ablate.runs import describe
from gpt2.ablate.scaling import compute_to_match, fit_power_law
from gpt2.ablate.sweep import Sweep
from gpt2.ablate.verdicts import NO_DIFFERENCE, Sample, Verdict, compare
from gpt2.utils.text import format_count

_SEEDS_FOR_NOISE = 5
AMOUNTS = ("tokens", "flops", "seconds")

LEAVES_ROOM = "“No difference larger than X” leaves room for one of up to X, either way."


def samples(sweep: Sweep, results: Iterable[Result]) -> dict[str, Sample]:
    """Returns the final scores of each arm."""
    by_arm: dict[str, list[Result]] = {arm.name: [] for arm in sweep.arms}
    for result in results:
        by_arm[result.run.arm].append(result)
    untuned = {name for name, choice in sweep.chosen.items() if choice is None}
    return {
        name: Sample({}, diverged=len(sweep.choices()))  # with every choice
        if name in untuned
        else Sample(
            {r.run.seed: r.score(sweep.score) for r in members if r.state == "finished"},
            diverged=sum(r.state == "diverged" for r in members),
            failed=sum(r.state == "failed" for r in members),
        )
        for name, members in by_arm.items()
    }


def judge(sweep: Sweep, results: Iterable[Result]) -> dict[str, Verdict]:
    """Returns the verdict on each arm but the baselines, size by size."""
    by_arm = samples(sweep, results)
    verdicts: dict[str, Verdict] = {}
    for baseline, *others in sweep.groups():
        if others:
            arms = {arm.name: by_arm[arm.name] for arm in others}
            verdicts |= compare(by_arm[baseline.name], arms, paired=sweep.paired)
    return verdicts


def verdict_table(
    sweep: Sweep, by_arm: Mapping[str, Sample], verdicts: Mapping[str, Verdict]
) -> str:
    """Returns a row for each arm: its runs, and what they say."""
    rows = []
    for arm in (arm for group in sweep.groups() for arm in group):
        scores = list(by_arm[arm.name].scores.values())
        deviation = f" ± {stdev(scores):.4f}" if len(scores) > 1 else ""
        row = [arm.name, f"{len(scores)}", f"{mean(scores):.4f}{deviation}" if scores else "-"]
        if verdict := verdicts.get(arm.name):
            row += [
                _number(verdict.difference, "+.4f"),
                _interval(verdict.low, verdict.high, "+.4f"),
                _number(verdict.p_value, ".2g"),
                _number(verdict.detectable, ".4f"),
                verdict.words,
            ]
        rows.append(row + [""] * (8 - len(row)))
    return table(
        ["arm", "runs", "mean ± sd", "difference", "95 % interval", "p", "could find", "verdict"],
        rows,
    )


def short_verdicts(
    sweep: Sweep, by_arm: Mapping[str, Sample], verdicts: Mapping[str, Verdict]
) -> list[list[str]]:
    """Returns what a screen has room for of `verdict_table`: a header, and a row for each arm."""
    rows = [["arm", "mean", "difference", "95 % interval", "verdict"]]
    for arm in (arm for group in sweep.groups() for arm in group):
        scores = list(by_arm[arm.name].scores.values())
        row = [arm.name, f"{mean(scores):.4f}" if scores else "-", "", "", ""]
        if verdict := verdicts.get(arm.name):
            interval = _interval(verdict.low, verdict.high, "+.4f").strip("()")
            row[2:] = [_number(verdict.difference, "+.4f"), interval, verdict.words]
        rows.append(row)
    return rows


def describe_room(verdicts: Mapping[str, Verdict]) -> str:
    """Returns what verdicts of no difference leave open, for a screen; empty if there are none.

    "No difference larger than 2" is read as if there were none.
    """
    room = [verdict for verdict in verdicts.values() if verdict.words.startswith(NO_DIFFERENCE)]
    if not room:
        return ""
    ends = sorted({f"{each.detectable:.3g}" for each in room}, key=float)
    found = " to ".join(dict.fromkeys([ends[0], ends[-1]]))
    return f"{LEAVES_ROOM} These seeds could find {found}; more find smaller ones."


def noise_table(sweep: Sweep, by_arm: Mapping[str, Sample]) -> str:
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
            low, high = deviation_interval(list(scores.values()))
            row = [arm.name, str(len(scores)), f"{deviation:.4f} {_interval(low, high, '.4f')}"]
            first = by_arm[baseline.name].scores
            pairs = [(first[seed], scores[seed]) for seed in scores if seed in first]
            related = ""
            if arm != baseline and len(pairs) >= _SEEDS_FOR_NOISE:
                correlation = scipy.stats.pearsonr(*zip(*pairs, strict=True))
                ends = correlation.confidence_interval()
                span = _interval(ends.low, ends.high, "+.2f")
                related = f"{correlation.statistic:+.2f} {span}"
            if sweep.paired:
                deviation = stdev(b - a for a, b in pairs) if related else math.nan
            needed = _seeds_needed(deviation, max(1, len(others)), sweep.paired)
            rows.append([*row, related, needed])
    header = ["arm", "runs", "sd", "correlation by seed", "seeds to find 0.01"]
    return table(header, rows) if rows else ""


def reach_table(sweep: Sweep, results: Sequence[Result]) -> str:
    """Returns what each arm takes to reach its baseline's final score; empty if nothing is known.

    The shares are of what the baseline takes in the whole run.
    """
    rows, targets = [], []
    for baseline, *others in sweep.groups():
        reference = _finished(results, baseline.name)
        if not reference or not others:
            continue
        finals = [result.score(sweep.score) for result in reference]
        target, target_variance = mean(finals), _variance_of_mean(finals)
        targets.append(f"{target:.4f}" + (f" at {baseline.size}" if baseline.size else ""))
        for arm in others:
            members, row = _finished(results, arm.name), [arm.name]
            diverged = sum(r.run.arm == arm.name and r.state == "diverged" for r in results)
            for amount in AMOUNTS:
                wholes = [getattr(r.curve, amount)[-1] for r in reference]
                curves = [(getattr(r.curve, amount), r.curve.scores) for r in members]
                shares = [amount_to_reach(*curve, target) / mean(wholes) for curve in curves]
                # The target is the mean of few runs, and so is what the baseline takes.
                slopes = [log_amount_per_score(*curve, target) for curve in curves]
                uncertain = (
                    mean(slopes or [math.nan]) ** 2 * target_variance,
                    _variance_of_mean([math.log(whole) for whole in wholes if whole > 0]),
                )
                noise = [(square, len(reference) - 1) for square in uncertain]
                row.append(_share([*shares, *[math.inf] * diverged], noise))
            rows.append(row)
    if not rows:
        return ""
    return (
        f"To reach the baseline's final {', '.join(targets)}: the share of what the baseline "
        "takes, with 95 % intervals over seeds, each share by itself: unlike the intervals of "
        "differences, they do not hold together. Curves are read in the middle of their schedules, "
        "as straight lines between validations.\n\n"
        + table(["arm", "tokens", "FLOPs", "time"], rows)
    )


def tuning_table(sweep: Sweep) -> str:
    """Returns what each arm chose among the values that are tuned."""
    rows, scores = [], sweep.tuning()
    for name, choice in sweep.chosen.items():
        if choice is None:
            rows.append([name, "nothing: no choice has a score", "", ""])
            continue
        score = next(score for tried, score in scores[name] if tried == choice)
        edges = [
            option
            for option, values in sweep.tune.items()
            if all(isinstance(value, int | float) for value in values)
            and choice[option] in (min(values), max(values))
        ]
        edge = f"at the edge of {', '.join(edges)}: a wider grid may do better" if edges else ""
        rows.append([name, describe(choice), f"{score:.4f}", edge])
    return table(["arm", "chosen", "score", "remark"], rows)


def broken_table(results: Iterable[Result]) -> str:
    """Returns the runs that diverged or failed, and why; empty if none did."""
    rows = [
        [r.run.label, r.state, str(r.steps), r.error]
        for r in results
        if r.state in ("diverged", "failed")
    ]
    return table(["run", "state", "steps", "why"], rows) if rows else ""


def scaling_points(
    sweep: Sweep, results: Sequence[Result]
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Returns (FLOPs, final score) of the finished runs, by change and by size.

    A change without a finished run at some size is left out.
    """
    points: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for arm in sweep.arms:
        members = _finished(results, arm.name)
        points.setdefault(arm.change, {})[arm.size] = [
            (float(r.curve.flops[-1]), r.score(sweep.score)) for r in members
        ]
    return {change: by_size for change, by_size in points.items() if all(by_size.values())}


def scaling_table(sweep: Sweep, points: Mapping[str, Mapping[str, Sequence]]) -> str:
    """Returns the power law of each change, and what it saves of the baseline's compute."""
    rows, baseline = [], sweep.baseline.change
    all_runs = {
        change: [run for runs in by_size.values() for run in runs]
        for change, by_size in points.items()
    }
    laws = {change: fit_power_law(*zip(*runs, strict=True)) for change, runs in all_runs.items()}
    for change, fit in laws.items():
        runs, share = all_runs[change], ""
        if baseline in laws and change != baseline:
            largest = max(flops for flops, _ in all_runs[baseline])
            middle, low, high = compute_to_match(laws[baseline], fit, largest)
            share = f"{_number(middle, '.2f')} {_interval(low, high, '.2f')}"
        span = f"{format_count(min(runs)[0])} to {format_count(max(runs)[0])}"
        exponent = f"{fit.exponent:.4f} ± {fit.error:.4f}"
        off = f"{math.expm1(fit.farthest):.1%}"
        if math.isfinite(fit.p_misfit):
            off += f", p = {fit.p_misfit:.2g}"
        rows.append([change, f"{len(runs)}", span, exponent, off, share])
    header = ["arm", "runs", "FLOPs", "exponent", "off the law", "compute for the baseline's loss"]
    return table(header, rows)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
        for line in lines
    )


def _finished(results: Iterable[Result], arm: str) -> list[Result]:
    """Returns the results of an arm's runs that finished, with a curve."""
    return [
        r for r in results if r.run.arm == arm and r.state == "finished" and len(r.curve.scores)
    ]


def _variance_of_mean(values: Sequence[float]) -> float:
    return variance(values) / len(values) if len(values) > 1 else 0.0


def _share(shares: list[float], noise: Sequence[tuple[float, int]]) -> str:
    if not shares:
        return "-"
    if missed := shares.count(math.inf):
        return f"reached by {len(shares) - missed} of {len(shares)}"
    if any(map(math.isnan, shares)):
        return "before the first validation"
    middle, low, high = ratio_interval(shares, noise)
    return f"{middle:.2f} {_interval(low, high, '.2f')}".strip()


def _seeds_needed(deviation: float, num_arms: int, paired: bool) -> str:
    if math.isnan(deviation):
        return ""
    if not deviation:
        return "1"
    return str(seeds_needed(deviation, 0.01, num_arms=num_arms, paired=paired))


def _number(value: float, form: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else "-"


def _interval(low: float, high: float, form: str) -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return ""
    return f"({_number(low, form)} to {_number(high, form)})"
