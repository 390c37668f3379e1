"""The report of a sweep: report.md, report.html, verdicts.json, results.csv and pictures.

Templates are report.j2 in Markdown, ledger.j2 in HTML, whose rows open with a click, and page.j2
around both, which needs no network.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
import numpy as np
import pandas as pd
from markdown_it import MarkdownIt

from gpt2.lab.ablate import pictures, tables
from gpt2.lab.ablate.arms import differences
from gpt2.lab.ablate.judge import compared, judge, sample
from gpt2.lab.ablate.sweep import Sweep
from gpt2.lab.ablate.verdicts import Sample, Verdict
from gpt2.utils.files import write_text
from gpt2.utils.text import counted


def write_report(sweep: Sweep) -> pd.DataFrame:
    """Writes all files of the report, and returns the table of its verdicts."""
    root = sweep.root
    title = root.resolve().name
    results = sweep.results()
    verdicts = judge(sweep, results)
    samples = {}
    for arm in sweep.arms:
        samples[arm.name] = sample(results, arm)
    table = tables.verdict_table(samples, verdicts)
    rows = results.drop(columns=["run", "curve", "score"])
    rows["folder"] = [folder.relative_to(root) for folder in results.folder]
    write_text(root / "results.csv", rows.to_csv(index=False))
    for_programs = pd.DataFrame(map(vars, verdicts.values()), index=verdicts)
    for_programs = for_programs.drop(columns="detectable", errors="ignore")
    write_text(root / "verdicts.json", for_programs.to_json(orient="index", indent=2))
    drawn = _draw(sweep, results, samples, verdicts)
    broken = results[results.state.isin(["diverged", "failed"])]
    states = results[results.purpose == "compare"].state
    text = render(
        "report.j2",
        title=title,
        sweep=sweep,
        seeds=sorted({sweep.num_seeds(arm) for arm in sweep.arms}),
        states=states.value_counts().sort_index(),
        pictures=drawn,
        verdicts=table,
        metrics=tables.metrics_table(sweep, results),
        reach=tables.reach_table(sweep, results),
        tuning=tables.tuning_table(sweep, results),
        broken=broken[["run", "state", "steps", "error"]],
        differences=differences,
    )
    text = re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
    write_text(root / "report.md", text)
    write_page(root, title, MarkdownIt("js-default").render(text), drawn)
    return table


def write_page(root: Path, title: str, body: str, drawn: Sequence[str]) -> None:
    """Writes report.html, with the pictures of `root` that its body names in it."""
    for name in drawn:
        picture = (root / name).read_bytes()
        data = base64.b64encode(picture).decode()
        body = body.replace(f'src="{name}"', f'src="data:image/png;base64,{data}"')
    page = render("page.j2", title=title, body=body)
    write_text(root / "report.html", page)


def render(template: str, **context: object) -> str:
    """Fills a template."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["counted"] = counted
    return environment.get_template(template).render(context)


def _draw(
    sweep: Sweep,
    results: pd.DataFrame,
    samples: Mapping[str, Sample],
    verdicts: Mapping[str, Verdict],
) -> list[str]:
    """Draws what there is, and returns the names of the pictures."""
    root = sweep.root
    differences = [verdict.difference for verdict in verdicts.values()]
    if not np.isfinite(differences).any():
        return []
    baseline = sweep.arms[0].name
    first = samples[baseline].mean
    shown = {baseline: Verdict(0.0, "baseline", first), **verdicts}
    dots = {}
    curves = {}
    for arm in sweep.arms:
        dots[arm.name] = samples[arm.name].scores - first
        found = compared(results, arm).curve
        validated = [curve for curve in found if len(curve.scores)]
        if validated:
            curves[arm.name] = validated
    pictures.plot_differences(root / "differences.png", shown, dots, sweep.unit)
    pictures.plot_curves(root / "curves.png", curves, sweep.unit)
    return ["differences.png", "curves.png"]
