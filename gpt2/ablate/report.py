"""The report of a sweep: report.md, report.html, results.csv and pictures."""

import base64
import html
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from gpt2.ablate import pictures, tables
from gpt2.ablate.arms import describe_warmup
from gpt2.ablate.results import Result, read_result, write_csv
from gpt2.ablate.sweep import Sweep
from gpt2.ablate.verdicts import Sample, Verdict, widest
from gpt2.config import differences
from gpt2.utils.files import write_text
from gpt2.utils.terminal import align, wrap
from gpt2.utils.text import counted, format_count

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2937; max-width: 70rem; margin: 2rem auto;
       padding: 0 1.5rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
table { border-collapse: collapse; font-size: 0.93rem; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid #e5e7eb; padding: 0.35rem 0.9rem 0.35rem 0; text-align: left; }
td:not(:first-child):not(:last-child) { white-space: nowrap; }
td:first-child { overflow-wrap: anywhere; min-width: 10rem; } td:last-child { min-width: 10rem; }
img { max-width: 100%; }
code, pre { font-size: 0.88rem; background: #f3f4f6; border-radius: 4px; padding: 0.1rem 0.3rem; }
pre { padding: 0.8rem; overflow-x: auto; white-space: pre-wrap; }
"""

_STATES = {"waiting": "to come"}
_ALIKE = {
    "tokens": "as many tokens",
    "flops": "as many FLOPs, by the model's formula",
    "seconds": "as many seconds of training steps, by a step measured before the runs",
    "params": "as many parameters beside looked-up tables, by the width of the MLP, and as many "
    "tokens",
}


def write_report(sweep: Sweep) -> str:
    """Writes all files of the report, and returns its verdicts for the screen."""
    results = sweep.results()
    choosing = [read_result(run, sweep.score) for run in sweep.choosing_runs()]
    by_arm, verdicts = tables.samples(sweep, results), tables.judge(sweep, results)
    write_csv(sweep.root / "results.csv", [*choosing, *results], sweep.root)
    text = "\n\n".join(
        section
        for section in (
            f"# {sweep.root.resolve().name}",
            _introduction(sweep, results),
            "## Verdicts",
            tables.verdict_table(sweep, by_arm, verdicts),
            _explanation(sweep, verdicts),
            _differences(sweep, by_arm, verdicts),
            "## Curves",
            _curves(sweep, results),
            tables.reach_table(sweep, results),
            *_scaling(sweep, results),
            *_noise(sweep, by_arm),
            *_tuning(sweep),
            *_broken([*choosing, *results]),
            "## What differs",
            _options(sweep),
            "## To repeat it",
            "```\n" + "\n".join(sweep.commands) + "\n```",
            _environments(results),
            "Each run's folder holds its options: `python train.py --config=RUN/config.json "
            "--workdir=NEW` repeats it. results.csv has a row for each run.",
        )
        if section
    )
    write_text(sweep.root / "report.md", text + "\n")
    write_text(sweep.root / "report.html", _html(text, sweep.root))
    shown = align(tables.short_verdicts(sweep, by_arm, verdicts))
    return "\n".join(filter(None, [shown, wrap(tables.describe_room(verdicts))]))


def _introduction(sweep: Sweep, results: Sequence[Result]) -> str:
    config, changes = sweep.baseline.config, {arm.change for arm in sweep.arms}
    states = Counter(result.state for result in results)
    sizes = [group[0].size for group in sweep.groups()]
    tokens = config.train.num_steps * config.tokens_per_step
    part = config.train.eval_batches
    lines = [
        f"{counted(len(changes) - 1, 'arm')} beside the baseline"
        + (f" at the sizes {', '.join(sizes)}" if len(sizes) > 1 else "")
        + f", {counted(sweep.num_seeds, 'seed')} each. Compared runs: "
        + ", ".join(f"{n} {_STATES.get(state, state)}" for state, n in sorted(states.items()))
        + ".",
        f"All arms{' of a size' if len(sizes) > 1 else ''} get {_ALIKE[sweep.equal]}. The "
        f"baseline{f' of {sizes[0]}' if len(sizes) > 1 else ''} trains "
        f"{config.train.num_steps:,} steps of {config.tokens_per_step:,} tokens, "
        f"{format_count(tokens)} in all, on `{config.data.corpus}` with the tokenizer "
        f"`{config.data.tokenizer}`.",
        f"The score is the last validation, in {sweep.unit}, on "
        + (f"{part} of the split's batches" if part else "the whole split")
        + ". Runs are ranked at the end of their schedules only.",
    ]
    if note := describe_warmup(config):
        lines.append(note)
    if len({arm.config.data.tokenizer for arm in sweep.arms}) > 1:
        lines.append("Tokenizers differ, so that losses per token do not compare.")
    if len({arm.config.model.context_length for arm in sweep.arms}) > 1:
        lines.append("Context lengths differ: a longer one predicts from more text.")
    return "\n".join(lines)


def _options(sweep: Sweep) -> str:
    """Returns what each arm sets otherwise than its baseline, equal terms and recipes included."""
    rows = []
    for group in sweep.groups():
        for arm in group[1:]:
            changed = differences(group[0].config, arm.config)
            what = ", ".join(f"`{name}={new}` ({old})" for name, (old, new) in changed.items())
            rows.append(f"- {arm.name}: {what or 'nothing'}")
    return "Each arm, and in brackets what its baseline has:\n\n" + "\n".join(rows)


def _explanation(sweep: Sweep, verdicts: Mapping[str, Verdict]) -> str:
    if not verdicts:
        return ""
    together = "all arms of a size" if len(sweep.groups()) > 1 else "all arms"
    text = (
        f"A negative difference is better. Intervals hold for {together} together. "
        "“Could find” is the smallest true difference that so many seeds, this noisy, find in "
        f"four of five sweeps. {tables.LEAVES_ROOM}"
    )
    if methods := sorted({verdict.method for verdict in verdicts.values()} - {"", "none"}):
        text += f" Method: {'; '.join(methods)}."
    if sweep.tune:
        text += " They hold for the values that were chosen, on the same validation text."
    if sweep.until:
        reached = "was reached" if widest(verdicts) <= sweep.until else "was not reached"
        text += (
            f" Seeds were added to all arms until no interval would reach further than "
            f"{sweep.until:g} to either side, which {reached}. The rule looks at widths only, "
            "never at differences. Widths that are small by chance stop early: from three seeds "
            "on, false verdicts on a single arm come in 7 % of sweeps, paired in 10 %, not in 5 %."
        )
    raised = sweep.num_seeds > sweep.first_num_seeds
    if raised and (sweep.seeds_were_raised or not sweep.until):
        text += (
            f" Seeds were raised from {sweep.first_num_seeds} to {sweep.num_seeds} by commands "
            "that came after runs had ended. If that was done because of their verdicts, false "
            "ones are more frequent than intervals say."
        )
    return text


def _environments(results: Sequence[Result]) -> str:
    """Says with what the runs were made, and whether that differs between them."""
    lines = [
        json.loads(line)
        for result in results
        if (path := result.run.workdir / "environment.jsonl").exists()
        for line in path.read_text().splitlines()
    ]
    if not lines:
        return ""
    parts = []
    for name in ("commit", "clean", "jax", "device_kind", "devices"):
        values = sorted({str(line.get(name)) for line in lines})
        differ = " (runs differ)" if len(values) > 1 else ""
        parts.append(f"{name} {', '.join(values)}{differ}")
    return "Made with " + ", ".join(parts) + "."


def _differences(
    sweep: Sweep, by_arm: Mapping[str, Sample], verdicts: Mapping[str, Verdict]
) -> str:
    """Draws the differences, if there are any, and returns the picture's line."""
    relative = {}
    for baseline, *others in sweep.groups():
        if first := by_arm[baseline.name].scores:
            middle = mean(first.values())
            if not sweep.paired:
                relative[baseline.name] = [score - middle for score in first.values()]
            for arm in others:
                scores = by_arm[arm.name].scores
                relative[arm.name] = [
                    score - (first[seed] if sweep.paired else middle)
                    for seed, score in scores.items()
                    if seed in first or not sweep.paired
                ]
    shown = {name: v for name, v in verdicts.items() if math.isfinite(v.difference)}
    relative = {n: scores for n, scores in relative.items() if n in shown or n not in verdicts}
    if not shown:
        return ""
    pictures.plot_differences(sweep.root / "differences.png", shown, relative, sweep.unit)
    dots = "differences of single seeds" if sweep.paired else "single runs"
    return (
        "![Differences from the baseline](differences.png)\n\n"
        f"Bars are the intervals of the table, dots {dots}."
    )


def _curves(sweep: Sweep, results: Sequence[Result]) -> str:
    """Draws the curves, if there are any, and returns the picture's line."""
    curves = {arm.name: [r.curve for r in results if r.run.arm == arm.name] for arm in sweep.arms}
    if not any(len(curve.scores) for members in curves.values() for curve in members):
        return "There is no validation yet."
    changes = list(dict.fromkeys(arm.change for arm in sweep.arms))
    sizes = [group[0].size for group in sweep.groups()]
    pictures.plot_curves(
        sweep.root / "curves.png",
        curves,
        sweep.unit,
        log_x=len(sizes) > 1,
        looks={arm.name: (changes.index(arm.change), sizes.index(arm.size)) for arm in sweep.arms}
        if len(sizes) > 1
        else None,
    )
    return "![Validation over tokens, FLOPs and time](curves.png)"


def _scaling(sweep: Sweep, results: Sequence[Result]) -> list[str]:
    if len(sweep.groups()) == 1:
        return []
    points = tables.scaling_points(sweep, results)
    if not points:
        return []
    pictures.plot_scaling(sweep.root / "scaling.png", points, sweep.unit)
    return [
        "## Loss against compute",
        "![Final validation over FLOPs](scaling.png)",
        tables.scaling_table(sweep, points),
        "Lines are power laws without an irreducible loss, by least squares of logarithms; errors "
        "are 95 % intervals. The last column is the share of the baseline's compute at its largest "
        "size that an arm needs for the same loss, by these laws. Its interval holds if losses "
        "follow them, and is left out where an arm's loss may not fall with compute at all. "
        "“Off the law” is how far the mean of a size lies from it at most. Its p is the chance of "
        "so much by seeds alone: below 0.05 losses follow another curve, and neither exponent nor "
        "share is to be trusted. One seed cannot tell.",
    ]


def _noise(sweep: Sweep, by_arm: Mapping[str, Sample]) -> list[str]:
    noise = tables.noise_table(sweep, by_arm)
    if not noise:
        return []
    return [
        "## Noise",
        noise,
        "The standard deviation over seeds and the correlation with the baseline's runs of the "
        "same seeds, both with 95 % intervals, and how many seeds of each arm find a true "
        "difference of 0.01 in four of five sweeps"
        + (", compared seed by seed." if sweep.paired else "."),
    ]


def _tuning(sweep: Sweep) -> list[str]:
    if not sweep.tune:
        return []
    number = len(sweep.choices()) * sweep.num_tune_seeds
    grid = ", ".join(f"`{name}`: {', '.join(map(str, v))}" for name, v in sweep.tune.items())
    sections = [
        "## Tuning",
        f"Each arm had {counted(number, 'run')} to choose among {grid}, with "
        f"{counted(sweep.num_tune_seeds, 'seed')} that no compared run uses.",
        tables.tuning_table(sweep),
    ]
    for option, values in sweep.tune.items():
        if not all(isinstance(value, int | float) for value in values):
            continue
        best: dict[str, dict[float, float]] = {}
        for name, scores in sweep.tuning().items():
            by_value: dict[float, float] = dict.fromkeys(values, math.nan)
            for choice, score in scores:
                by_value[choice[option]] = min(score, by_value[choice[option]], key=_nan_last)
            best[name] = by_value
        picture = f"tuning-{option}.png"
        pictures.plot_tuning(sweep.root / picture, option, best, sweep.unit)
        sections.append(f"![Score against {option}]({picture})")
    return sections


def _nan_last(score: float) -> float:
    return math.inf if math.isnan(score) else score


def _broken(results: Sequence[Result]) -> list[str]:
    broken = tables.broken_table(results)
    return ["## Runs that did not finish", broken] if broken else []


def _html(text: str, root: Path) -> str:
    """Returns a page that opens without a network: its pictures are inside."""
    import markdown

    escaped = html.escape(text, quote=False)
    body = markdown.markdown(escaped, extensions=["tables", "fenced_code"])

    def inline(match: re.Match) -> str:
        data = base64.b64encode((root / match[1]).read_bytes()).decode()
        return f'src="data:image/png;base64,{data}"'

    body = re.sub(r'src="([^":]+\.png)"', inline, body)
    title = html.escape(root.resolve().name)
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n{body}\n</html>\n"
    )
