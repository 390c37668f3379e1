"""The report of a sweep: report.md, report.html, verdicts.json, results.csv and pictures."""

import base64
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import jinja2
import pandas as pd

from gpt2.ablate import pictures, tables
from gpt2.ablate.arms import differences
from gpt2.ablate.judge import compared, judge, sample
from gpt2.ablate.results import write_csv
from gpt2.ablate.sweep import Sweep
from gpt2.ablate.verdicts import Sample, Verdict
from gpt2.training.code import read_starts
from gpt2.utils.files import write_json, write_text
from gpt2.utils.text import counted, format_count

_MADE_WITH = ("code", "commit", "clean", "jax", "device_kind", "devices")


def write_report(sweep: Sweep) -> pd.DataFrame:
    """Writes all files of the report, and returns the table of its verdicts."""
    root = sweep.root
    groups = sweep.groups()
    results = sweep.results()
    verdicts = judge(sweep, results)
    by_arm = {arm.name: sample(sweep, results, arm) for arm in sweep.arms}
    write_csv(root / "results.csv", results)
    if has_differences := any(
        math.isfinite(each.difference) for each in verdicts.values()
    ):
        _draw_differences(sweep, by_arm, verdicts)
    curves = {arm.name: list(compared(results, arm).curve) for arm in sweep.arms}
    if has_curves := any(
        len(curve.scores) for members in curves.values() for curve in members
    ):
        several: Any = dict(log_x=len(groups) > 1, num_sizes=len(groups))
        pictures.plot_curves(root / "curves.png", curves, sweep.unit, **several)
    if not (by_size := tables.sizes_table(sweep, verdicts)).empty:
        pictures.plot_sizes(root / "sizes.png", groups, verdicts, sweep.unit)
    broken = results[results.state.isin(["diverged", "failed"])]
    starts = [
        start for folder in results.folder for start in read_starts(folder / "run")
    ]
    context = {
        "title": root.resolve().name,
        "sweep": sweep,
        "seeds": sorted({sweep.num_seeds(arm) for arm in sweep.arms}),
        "states": sorted(Counter(results[results.purpose == "compare"].state).items()),
        "verdicts": tables.verdict_table(by_arm, verdicts),
        "methods": sorted({verdict.method for verdict in verdicts.values()} - {""}),
        "has_differences": has_differences,
        "has_curves": has_curves,
        "reach": tables.reach_table(sweep, results),
        "by_size": by_size,
        "tuning": tables.tuning_table(sweep),
        "tuning_pictures": _draw_tuning(sweep),
        "broken": broken[["run", "state", "steps", "error"]].astype(str),
        "options": {
            arm.name: differences(first.config, arm.config)
            | ({"code": ("that of the working tree", arm.commit)} if arm.commit else {})
            for first, *others in groups
            for arm in others
        },
        "taken": sorted(Counter(results.taken_from.str.partition("/")[0]).items()),
        "codes": sorted(set(results.code) - {""}),
        "made_with": {
            key: sorted({str(each.get(key)) for each in starts}) for key in _MADE_WITH
        },
    }
    cost = results[results.taken_from == ""][["tokens", "flops", "seconds"]].sum()
    judged = {
        arm: vars(each) | {"detectable": each.detectable()}
        for arm, each in verdicts.items()
    }
    for_programs = {
        name: getattr(sweep, name)
        for name in ("unit", "equal", "paired", "looks", "find", "chosen")
    }
    for_programs |= {"codes": context["codes"], "cost_here": cost.to_dict()}
    for_programs["sizes"] = by_size.to_dict("records")
    for_programs["arms"] = {
        arm: vars(by_arm[arm]) | judged.get(arm, {}) for arm in by_arm
    }
    tree = json.loads(
        json.dumps(for_programs), parse_constant=lambda _: None
    )  # in place of nan
    write_json(root / "verdicts.json", tree)
    text = _render("markdown.j2", context, root)
    write_text(root / "report.md", re.sub(r"\n{3,}", "\n\n", text).strip() + "\n")
    write_text(root / "report.html", _render("html.j2", context, root))
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


def _draw_differences(
    sweep: Sweep, by_arm: Mapping[str, Sample], verdicts: Mapping[str, Verdict]
) -> None:
    """Draws each arm's difference, with dots for its runs, or for its pairs."""
    dots: dict[str, list[float]] = {}
    for group in sweep.groups():
        first = by_arm[group[0].name].scores
        for name in (arm.name for arm in group if first):
            scores = by_arm[name].scores
            less = (
                first if sweep.paired else dict.fromkeys(scores, mean(first.values()))
            )
            if found := [
                score - less[seed] for seed, score in scores.items() if seed in less
            ]:
                dots[name] = found
    pictures.plot_differences(
        sweep.root / "differences.png", verdicts, dots, sweep.unit
    )


def _draw_tuning(sweep: Sweep) -> list[str]:
    """Draws the scores over each option of numbers that is tuned, and returns the pictures."""
    drawn = []
    tuning = sweep.tuning()
    for option, values in sweep.tune.items():
        if isinstance(values[0], str):
            continue
        means: dict[
            str, dict[float, float]
        ] = {}  # the best of all choices with a value
        for name, scores in tuning.items():
            by_value = means.setdefault(name, dict.fromkeys(values, math.inf))
            for choice, score in scores:
                by_value[choice[option]] = min(by_value[choice[option]], score)
        drawn.append(f"tuning-{option}.png")
        pictures.plot_tuning(sweep.root / drawn[-1], option, means, sweep.unit)
    return drawn
