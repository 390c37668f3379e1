"""The report of a sweep: report.md, report.html, results.csv and pictures."""

import base64
import html
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean

from gpt2.ablate import pictures
from gpt2.ablate.results import Result, amount_to_reach, read_result, write_csv
from gpt2.ablate.runs import describe
from gpt2.ablate.sweep import Sweep
from gpt2.ablate.verdicts import Sample, Verdict, compare, ratio_interval
from gpt2.utils.files import write_text
from gpt2.utils.text import counted, format_count

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2937; max-width: 70rem; margin: 2rem auto;
       padding: 0 1.5rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
table { border-collapse: collapse; font-size: 0.93rem; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid #e5e7eb; padding: 0.35rem 0.9rem 0.35rem 0; text-align: left; }
img { max-width: 100%; }
code, pre { font-size: 0.88rem; background: #f3f4f6; border-radius: 4px; padding: 0.1rem 0.3rem; }
pre { padding: 0.8rem; overflow-x: auto; white-space: pre-wrap; }
"""


def samples(sweep: Sweep, results: Iterable[Result]) -> dict[str, Sample]:
    """Returns the final scores of each arm, the baseline first."""
    by_arm: dict[str, list[Result]] = {arm.name: [] for arm in sweep.arms}
    for result in results:
        by_arm[result.run.arm].append(result)
    return {
        name: Sample(
            {r.run.seed: r.score(sweep.score) for r in members if r.state == "finished"},
            diverged=sum(r.state == "diverged" for r in members),
            failed=sum(r.state == "failed" for r in members),
        )
        for name, members in by_arm.items()
    }


def judge(sweep: Sweep, results: Iterable[Result]) -> dict[str, Verdict]:
    """Returns the verdict on each arm but the baseline."""
    baseline, *others = samples(sweep, results).items()
    return compare(baseline[1], dict(others), paired=sweep.paired)


def write_report(sweep: Sweep) -> str:
    """Writes all files of the report, and returns its table of verdicts for the screen."""
    results = sweep.results()
    chosen = [read_result(run, sweep.score) for run in sweep.choosing_runs()]
    verdicts = judge(sweep, results)
    write_csv(sweep.root / "results.csv", [*chosen, *results], sweep.root)
    drawn = _draw(sweep, results, verdicts)
    verdict_table = _verdict_table(sweep, results, verdicts)
    sections = [
        f"# {sweep.root.resolve().name}",
        _introduction(sweep, results),
        "## Verdicts",
        verdict_table,
        _explanation(sweep, verdicts),
        *(["![Differences from the baseline](differences.png)"] if "differences" in drawn else []),
        "## Curves",
        *(["![Validation over tokens, FLOPs and time](curves.png)"] if "curves" in drawn else []),
        _reach_table(sweep, results),
        *_tuning(sweep),
        *_broken([*chosen, *results]),
        "## To repeat it",
        f"```\n{sweep.command}\n```",
        "Each run's folder holds its options: `python train.py --config=RUN/config.json "
        "--workdir=NEW` repeats it. results.csv has a row for each run.",
    ]
    text = "\n\n".join(section for section in sections if section) + "\n"
    write_text(sweep.root / "report.md", text)
    write_text(sweep.root / "report.html", _html(text, sweep.root))
    return verdict_table


def _introduction(sweep: Sweep, results: Sequence[Result]) -> str:
    config = sweep.baseline.config
    states = Counter(result.state for result in results)
    alike = {
        "tokens": "as many tokens",
        "flops": "as many FLOPs, by the model's formula",
        "seconds": "as many seconds of training steps, by a step measured before the runs",
        "params": "as many parameters, by the width of the MLP, and as many tokens",
    }[sweep.equal]
    tokens = config.train.num_steps * config.tokens_per_step
    runs = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
    lines = [
        f"{counted(len(sweep.arms) - 1, 'arm')} beside the baseline, "
        f"{counted(sweep.num_seeds, 'seed')} each. Runs: {runs}.",
        f"All arms get {alike}. The baseline trains {config.train.num_steps:,} steps of "
        f"{config.tokens_per_step:,} tokens, {format_count(tokens)} in all, on "
        f"`{config.data.corpus}` with the tokenizer `{config.data.tokenizer}`.",
        f"The score is the last validation, in {sweep.unit}, on "
        + (
            f"the first {counted(config.train.eval_batches, 'batch').replace('batchs', 'batches')}"
            if config.train.eval_batches
            else "the whole split"
        )
        + ". Runs are ranked at the end of their schedules only.",
    ]
    if len({arm.config.data.tokenizer for arm in sweep.arms}) > 1:
        lines.append("Tokenizers differ, so that losses per token do not compare.")
    if len({arm.config.model.context_length for arm in sweep.arms}) > 1:
        lines.append("Context lengths differ: a longer one predicts from more text.")
    return "\n".join(lines)


def _verdict_table(sweep: Sweep, results: Sequence[Result], verdicts: Mapping[str, Verdict]) -> str:
    rows = []
    for name, sample in samples(sweep, results).items():
        scores = list(sample.scores.values())
        deviation = f" ± {_deviation(scores):.4f}" if len(scores) > 1 else ""
        row = [name, f"{len(scores)}", f"{mean(scores):.4f}{deviation}" if scores else "-"]
        if name in verdicts:
            verdict = verdicts[name]
            row += [
                _number(verdict.difference, "+.4f"),
                _interval(verdict.low, verdict.high, "+.4f"),
                _number(verdict.p_value, ".2g"),
                _number(verdict.detectable, ".4f"),
                verdict.words,
            ]
        else:
            row += ["", "", "", "", ""]
        rows.append(row)
    return _table(
        ["arm", "runs", "mean ± sd", "difference", "95 % interval", "p", "could find", "verdict"],
        rows,
    )


def _explanation(sweep: Sweep, verdicts: Mapping[str, Verdict]) -> str:
    methods = sorted({verdict.method for verdict in verdicts.values() if verdict.method})
    text = (
        "A negative difference is better. Intervals hold for all arms together. "
        "“Could find” is the smallest true difference that so many seeds, this noisy, find in "
        "four of five sweeps."
    )
    if methods:
        text += f" Method: {'; '.join(methods)}."
    if sweep.until:
        text += (
            f" Seeds were added to all arms until no interval reached further than {sweep.until:g} "
            "to either side. The rule looks at widths only, never at differences; widths that are "
            "small by chance stop early, so that intervals cover slightly less than they say."
        )
    return text


def _reach_table(sweep: Sweep, results: Sequence[Result]) -> str:
    """Returns what each arm takes to reach the baseline's final score, relative to the baseline."""
    baseline = sweep.baseline.name
    reference = [r for r in results if r.run.arm == baseline and r.state == "finished"]
    reference = [r for r in reference if len(r.curve.scores)]
    if not reference:
        return ""
    target = mean(result.score(sweep.score) for result in reference)
    rows = []
    for arm in sweep.arms[1:]:
        members = [r for r in results if r.run.arm == arm.name and r.state == "finished"]
        row = [arm.name]
        for amount in ("tokens", "flops", "seconds"):
            whole = mean(getattr(r.curve, amount)[-1] for r in reference)
            ratios = [
                amount_to_reach(getattr(r.curve, amount), r.curve.scores, target) / whole
                for r in members
            ]
            if not ratios or math.inf in ratios:
                reached = sum(map(math.isfinite, ratios))
                row.append(f"reached by {reached} of {len(ratios)}" if ratios else "-")
                continue
            middle, low, high = ratio_interval(ratios)
            row.append(f"{middle:.2f} {_interval(low, high, '.2f')}".strip())
        rows.append(row)
    if not rows:
        return ""
    return (
        f"To reach the baseline's final {target:.4f}, as a share of what the baseline takes, with "
        "95 % intervals over seeds. Between validations, curves are straight lines.\n\n"
        + _table(["arm", "tokens", "FLOPs", "time"], rows)
    )


def _tuning(sweep: Sweep) -> list[str]:
    if not sweep.tune:
        return []
    rows, scores = [], sweep.tuning()
    for name, choice in sweep.chosen().items():
        if choice is None:
            rows.append([name, "none: no choice has a score", "", ""])
            continue
        score = next(score for tried, score in scores[name] if tried == choice)
        edges = [
            option
            for option, values in sweep.tune.items()
            if len(values) > 1 and choice[option] in (min(values), max(values))
        ]
        edge = f"at the edge of {', '.join(edges)}: a wider grid may do better" if edges else ""
        rows.append([name, describe(choice), f"{score:.4f}", edge])
    number = len(sweep.choices()) * sweep.num_tune_seeds
    text = [
        "## Tuning",
        f"Each arm had {counted(number, 'run')} to choose among "
        + ", ".join(f"`{name}`: {', '.join(map(str, v))}" for name, v in sweep.tune.items())
        + f", with {counted(sweep.num_tune_seeds, 'seed')} that no compared run uses.",
        _table(["arm", "chosen", "score", "remark"], rows),
    ]
    text += [f"![Score against {name}](tuning-{name}.png)" for name in _plotted(sweep)]
    return text


def _plotted(sweep: Sweep) -> list[str]:
    """Returns the tuned options that are numbers, which can be drawn."""
    return [
        name
        for name, values in sweep.tune.items()
        if all(isinstance(value, int | float) for value in values)
    ]


def _broken(results: Sequence[Result]) -> list[str]:
    broken = [result for result in results if result.state != "finished"]
    if not broken:
        return []
    rows = [
        [r.run.label, r.state if r.state != "waiting" else "not finished", str(r.steps), r.error]
        for r in broken
    ]
    return ["## Runs that did not finish", _table(["run", "state", "steps", "why"], rows)]


def _draw(sweep: Sweep, results: Sequence[Result], verdicts: Mapping[str, Verdict]) -> set[str]:
    """Draws the pictures for which there are results, and returns their names."""
    drawn: set[str] = set()
    by_arm = samples(sweep, results)
    baseline = list(by_arm[sweep.baseline.name].scores.values())
    shown = {name: v for name, v in verdicts.items() if math.isfinite(v.difference)}
    if shown and baseline:
        middle = mean(baseline)
        relative = {name: [x - middle for x in by_arm[name].scores.values()] for name in shown}
        pictures.plot_differences(sweep.root / "differences.png", shown, relative, sweep.unit)
        drawn.add("differences")
    curves = {arm.name: [r.curve for r in results if r.run.arm == arm.name] for arm in sweep.arms}
    if any(len(curve.scores) for members in curves.values() for curve in members):
        pictures.plot_curves(sweep.root / "curves.png", curves, sweep.unit)
        drawn.add("curves")
    for option in _plotted(sweep):
        means: dict[str, dict[float, float]] = {}
        for name, scores in sweep.tuning().items():
            by_value: dict[float, list[float]] = {}
            for choice, score in scores:
                by_value.setdefault(choice[option], []).append(score)
            means[name] = {value: _best(each) for value, each in by_value.items()}
        pictures.plot_tuning(sweep.root / f"tuning-{option}.png", option, means, sweep.unit)
    return drawn


def _best(scores: Sequence[float]) -> float:
    finite = [score for score in scores if math.isfinite(score)]
    return min(finite) if finite else math.nan


def _deviation(scores: Sequence[float]) -> float:
    middle = mean(scores)
    return math.sqrt(sum((score - middle) ** 2 for score in scores) / (len(scores) - 1))


def _number(value: float, form: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else "-"


def _interval(low: float, high: float, form: str) -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return ""
    return f"({_number(low, form)} to {_number(high, form)})"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
        for line in lines
    )


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
