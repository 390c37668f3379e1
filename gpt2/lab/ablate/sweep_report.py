"""The report of a sweep: report.md, report.html, verdicts.json, results.csv and plots."""

import re
from collections.abc import Mapping

import numpy as np
import pandas as pd
from markdown_it import MarkdownIt
from rich.console import Console
from rich.table import Table

from gpt2.lab.ablate import sweep_tables
from gpt2.lab.ablate.difference_plot import plot_differences
from gpt2.lab.ablate.judge import compared, judge, sample
from gpt2.lab.ablate.sweep import Sweep
from gpt2.lab.ablate.verdicts import Sample, Verdict
from gpt2.lab.experiments.arms import differences
from gpt2.lab.experiments.curve_plot import plot_curves
from gpt2.lab.experiments.pages import render, write_page
from gpt2.utils.files import write_text


def write_report(sweep: Sweep) -> pd.DataFrame:
    """Write all files of the report, and return the table of verdicts."""
    root = sweep.root
    title = root.resolve().name
    results = sweep.results()
    verdicts = judge(sweep, results)
    samples = {arm.name: sample(results, arm) for arm in sweep.arms}
    table = sweep_tables.verdict_table(samples, verdicts)
    rows = results.drop(columns=["run", "curve", "score"])
    rows["folder"] = [folder.relative_to(root) for folder in results.folder]
    write_text(root / "results.csv", rows.to_csv(index=False))
    for_programs = pd.DataFrame(map(vars, verdicts.values()), index=verdicts)
    for_programs = for_programs.drop(columns="detectable", errors="ignore")
    write_text(root / "verdicts.json", for_programs.to_json(orient="index", indent=2))
    pictures = _draw(sweep, results, samples, verdicts)
    broken = results[results.state.isin(["diverged", "failed"])]
    states = results[results.purpose == "compare"].state
    text = render(
        "ablate/report.md.j2",
        title=title,
        sweep=sweep,
        seeds=sorted({sweep.num_seeds(arm) for arm in sweep.arms}),
        states=states.value_counts().sort_index(),
        pictures=pictures,
        verdicts=table,
        metrics=sweep_tables.metrics_table(sweep, results),
        reach=sweep_tables.reach_table(sweep, results),
        tuning=sweep_tables.tuning_table(sweep, results),
        broken=broken[["run", "state", "steps", "error"]],
        differences=differences,
    )
    text = re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
    write_text(root / "report.md", text)
    write_page(root, title, MarkdownIt("js-default").render(text), pictures)
    return table


def print_verdicts(table: pd.DataFrame) -> None:
    """Print the most important columns of a table of verdicts, in lines of 80 characters."""
    screen = Table(box=None, pad_edge=False)
    for title in ("arm", "difference", "interval", "verdict"):
        whole = title in ("difference", "interval")
        screen.add_column(title, no_wrap=whole, overflow="fold")
    for row in table.to_dict("records"):
        verdict = row.get("verdict") or f"mean {row['mean ± sd']}"
        screen.add_row(row["arm"], row.get("difference"), row.get("interval"), verdict)
    Console(width=80, markup=False, highlight=False).print(screen)


def _draw(
    sweep: Sweep,
    results: pd.DataFrame,
    samples: Mapping[str, Sample],
    verdicts: Mapping[str, Verdict],
) -> list[str]:
    """Draw the plots for which there are results, and return their file names."""
    root = sweep.root
    values = [verdict.difference for verdict in verdicts.values()]
    if not np.isfinite(values).any():
        return []
    baseline = sweep.arms[0].name
    mean = samples[baseline].mean
    shown = {baseline: Verdict(0.0, "baseline", mean), **verdicts}
    dots = {}
    curves = {}
    for arm in sweep.arms:
        dots[arm.name] = samples[arm.name].scores - mean
        validated = [
            curve for curve in compared(results, arm).curve if len(curve.scores)
        ]
        if validated:
            curves[arm.name] = validated
    plot_differences(root / "differences.png", shown, dots, sweep.unit)
    plot_curves(root / "curves.png", curves, sweep.unit)
    return ["differences.png", "curves.png"]
