"""The report of a sweep: report.md, report.html, results.csv and pictures."""

import base64
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import mean

import jinja2
import pandas as pd

from gpt2.ablate import pictures, tables
from gpt2.ablate.results import write_csv
from gpt2.ablate.sweep import Sweep
from gpt2.ablate.verdicts import Sample, Verdict, widest
from gpt2.config import differences
from gpt2.utils.files import write_text
from gpt2.utils.text import counted, format_count

_ENVIRONMENT = ("commit", "clean", "jax", "device_kind", "devices")


def write_report(sweep: Sweep) -> pd.DataFrame:
    """Writes all files of the report, and returns the table of its verdicts."""
    results = sweep.results()
    by_arm, verdicts = tables.samples(sweep, results), tables.judge(sweep, results)
    write_csv(sweep.root / "results.csv", results)
    points = tables.scaling_points(sweep, results) if len(sweep.groups()) > 1 else {}
    if points:
        pictures.plot_scaling(sweep.root / "scaling.png", points, sweep.unit)
    context = {
        "title": sweep.root.resolve().name,
        "sweep": sweep,
        "states": sorted(Counter(results[results.purpose == "compare"].state).items()),
        "verdicts": tables.verdict_table(sweep, by_arm, verdicts),
        "methods": sorted({verdict.method for verdict in verdicts.values()} - {""}),
        "widest": widest(verdicts),
        "has_differences": _draw_differences(sweep, by_arm, verdicts),
        "has_curves": _draw_curves(sweep, results),
        "reach": tables.reach_table(sweep, results),
        "scaling": tables.scaling_table(sweep, points),
        "noise": tables.noise_table(sweep, by_arm),
        "tuning": tables.tuning_table(sweep),
        "tuning_pictures": _draw_tuning(sweep),
        "broken": tables.broken_table(results),
        "options": {
            arm.name: differences(group[0].config, arm.config)
            for group in sweep.groups()
            for arm in group[1:]
        },
        "environments": _environments(results),
    }
    text = _render("markdown.j2", context, sweep.root)
    write_text(sweep.root / "report.md", re.sub(r"\n{3,}", "\n\n", text).strip() + "\n")
    write_text(sweep.root / "report.html", _render("html.j2", context, sweep.root))
    return context["verdicts"]


def _render(form: str, context: Mapping[str, object], root: Path) -> str:
    """Fills report.j2, which holds the report's words, in one of its forms."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=form == "html.j2",
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "one_line": lambda text: type(text)(" ").join(text.split()),
        "counted": counted,
        "count": format_count,
        "base64": lambda name: base64.b64encode((root / name).read_bytes()).decode(),
    }
    return environment.get_template("report.j2").render(context, form=form)


def _environments(results: pd.DataFrame) -> dict[str, list[str]]:
    """Returns with what the runs were made: the values of all runs, several where they differ."""
    lines = [
        json.loads(line)
        for folder in results.folder
        if (path := folder / "run" / "environment.jsonl").exists()
        for line in path.read_text().splitlines()
    ]
    if not lines:
        return {}
    return {name: sorted({str(line.get(name)) for line in lines}) for name in _ENVIRONMENT}


def _draw_differences(
    sweep: Sweep, by_arm: Mapping[str, Sample], verdicts: Mapping[str, Verdict]
) -> bool:
    """Draws the differences, if there are any, and returns whether there are."""
    shown = {name: v for name, v in verdicts.items() if math.isfinite(v.difference)}
    dots: dict[str, list[float]] = {}
    for baseline, *others in sweep.groups():
        if not (first := by_arm[baseline.name].scores):
            continue
        middle = mean(first.values())
        if not sweep.paired:
            dots[baseline.name] = [score - middle for score in first.values()]
        for name in (arm.name for arm in others if arm.name in shown):
            scores = by_arm[name].scores
            dots[name] = [score - middle for score in scores.values()]
            if sweep.paired:
                dots[name] = [scores[seed] - first[seed] for seed in scores.keys() & first.keys()]
    if shown:
        pictures.plot_differences(sweep.root / "differences.png", shown, dots, sweep.unit)
    return bool(shown)


def _draw_curves(sweep: Sweep, results: pd.DataFrame) -> bool:
    """Draws the curves, if there are any, and returns whether there are."""
    curves = {arm.name: list(tables.compared(results, arm).curve) for arm in sweep.arms}
    if not any(len(curve.scores) for members in curves.values() for curve in members):
        return False
    png, number = sweep.root / "curves.png", len(sweep.groups())
    pictures.plot_curves(png, curves, sweep.unit, log_x=number > 1, num_sizes=number)
    return True


def _draw_tuning(sweep: Sweep) -> list[str]:
    """Draws the scores over each option of numbers that is tuned, and returns the pictures."""
    drawn, tuning = [], sweep.tuning()
    for option, values in sweep.tune.items():
        if not all(isinstance(value, int | float) for value in values):
            continue
        best: dict[str, dict[float, float]] = {}
        for name, scores in tuning.items():
            best[name] = {}
            for value in values:  # the best of all choices with it
                found = [s for choice, s in scores if choice[option] == value and math.isfinite(s)]
                best[name][value] = min(found, default=math.nan)
        drawn.append(f"tuning-{option}.png")
        pictures.plot_tuning(sweep.root / drawn[-1], option, best, sweep.unit)
    return drawn
