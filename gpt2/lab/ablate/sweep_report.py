"""The report of a sweep: report.md, report.html, verdicts.json, results.csv and plots."""

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence

import pandas as pd

from gpt2.lab.ablate import sweep_tables
from gpt2.lab.ablate.difference_plot import plot_differences
from gpt2.lab.ablate.judge import arm_scores, compared, judge_sweep
from gpt2.lab.ablate.sweep import Sweep
from gpt2.lab.ablate.verdicts import CLEAR, ArmScores, Verdict, compare
from gpt2.lab.experiments.arms import differences
from gpt2.lab.experiments.cells import print_table
from gpt2.lab.experiments.curve_plot import plot_curves
from gpt2.lab.experiments.decisions import Decision
from gpt2.lab.experiments.pages import render, write_markdown
from gpt2.lab.experiments.run_folder import count_warnings
from gpt2.utils.files import write_text
from gpt2.utils.text import counted


def write_report(sweep: Sweep) -> tuple[pd.DataFrame, str]:
    """Write all files of the report, and return the table of verdicts and a note.

    The note lists the arms that have no clear verdict, but would have one if the sweep were paired.
    If there are no such arms, the note is "".
    """
    root = sweep.root
    title = root.resolve().name
    results = sweep.results()
    verdicts = judge_sweep(sweep, results)
    samples = {arm.name: arm_scores(results, arm) for arm in sweep.arms}
    table = sweep_tables.verdict_table(samples, verdicts)
    by_pairs = {}
    if not sweep.paired:
        arms = {name: samples[name] for name in verdicts}
        by_pairs = compare(samples[sweep.arms[0].name], arms, paired=True)
    # Interim analyses have lower levels, at which pairs might not lead to a clear verdict.
    note = "" if len(sweep.analyses) > 1 else _pairs_note(verdicts, by_pairs)
    rows = results.drop(columns=["run", "curve", "score"])
    rows["folder"] = [folder.relative_to(root) for folder in results.folder]
    write_text(root / "results.csv", rows.to_csv(index=False))
    for_programs = pd.DataFrame(map(vars, verdicts.values()), index=verdicts)
    for_programs = for_programs.drop(columns="detectable", errors="ignore")
    for_programs = for_programs.rename(columns={"error": "standard_error"})
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
        by_pairs=sweep_tables.verdict_table(samples, by_pairs),
        pairs_note=note,
        metrics=sweep_tables.metrics_table(sweep, results),
        reach=sweep_tables.reach_table(sweep, results),
        tuning=sweep_tables.tuning_table(sweep, results),
        tuning_notes=sweep_tables.tuning_notes(sweep),
        warnings=count_warnings(sweep.all_runs()),
        broken=broken[["run", "state", "steps", "error"]],
        differences=differences,
    )
    write_markdown(root, title, text, pictures)
    return table, note


def _pairs_note(
    verdicts: Mapping[str, Verdict], by_pairs: Mapping[str, Verdict]
) -> str:
    """Return a note that lists the arms on which only a paired sweep would have a clear verdict.

    If there are no such arms, return "". `verdicts` are the verdicts of the sweep. `by_pairs` are
    the verdicts of paired tests of the same runs. It is empty if the sweep is paired.
    """
    names = []
    for name, verdict in by_pairs.items():
        is_undecided = verdicts[name].words not in (*CLEAR, Decision.OPEN)
        if verdict.words in CLEAR and is_undecided:
            names.append(name)
    if not names:
        return ""
    return (
        "A comparison of pairs of runs with the same seed would have led to a clear verdict on"
        f" {', '.join(names)}, but this sweep began without --paired. For such a verdict, start a"
        " new sweep with --paired and with a --config.seed that gives new seeds, such as 100."
    )


def print_verdicts(
    table: pd.DataFrame, note: str = "", *, paired: bool = False
) -> None:
    """Print the baseline's mean, the main columns of a table of verdicts, and `note`.

    The table and the note fit into 80 columns. `paired` states whether the sweep is paired.
    """
    baseline = table.iloc[0]
    deviation = ", ± standard deviation" if "±" in baseline["mean ± sd"] else ""
    runs = counted(int(baseline.runs), "run")
    print(f"{baseline.arm}: mean {baseline['mean ± sd']} ({runs}{deviation})")
    if len(table) > 1:
        titles = ["arm", "difference", "95% interval", "verdict"]
        shown = table[1:].rename(columns={"interval": "95% interval"})
        shown = shown.reindex(columns=titles, fill_value="")
        print_table(shown)
        pairs = "the mean over pairs of " if paired else ""
        contained = "all intervals contain the true differences"
        if len(shown) == 1:
            contained = "it contains the true difference"
        print(
            f"difference: {pairs}arm minus baseline; below 0, the arm is better\n"
            f"interval: with 95 % probability, {contained}"
        )
    if note:
        print("\n" + textwrap.fill(note, 80))


def print_tuning_notes(sweeps: Sequence[Sweep]) -> None:
    """Print which tuned values are the smallest or the largest in their list; see `tuning_notes`.

    Also print that luck can decide which value is chosen, because few seeds are trained with each
    value.
    """
    for sweep in sweeps:
        for note in sweep_tables.tuning_notes(sweep):
            size = f"{sweep.root.name}: " if len(sweeps) > 1 else ""
            print("\n" + textwrap.fill(size + note, 80))
    if sweeps[0].tune:
        note = (
            "The verdicts hold only for the tuned values. These were chosen with"
            f" {counted(sweeps[0].tune_seeds, 'seed')}, so luck can favour an arm."
            " A new sweep with more --tune_seeds makes this less likely."
        )
        print("\n" + textwrap.fill(note, 80))


def _draw(
    sweep: Sweep,
    results: pd.DataFrame,
    samples: Mapping[str, ArmScores],
    verdicts: Mapping[str, Verdict],
) -> list[str]:
    """Plot the arms' differences and, if a run has several validations, the validation curves.

    Return the names of the written files. Differences are plotted only if one of them is finite.
    """
    root = sweep.root
    pictures = list[str]()
    baseline = sweep.arms[0].name
    mean = samples[baseline].mean
    shown = {baseline: Verdict(0.0, "baseline", mean), **verdicts}
    dots = {}
    curves = {}
    for arm in sweep.arms:
        # The baseline's mean over the seeds of the arm's verdict. With `paired`, its run's loss.
        zero = samples[baseline].scores if sweep.paired else shown[arm.name].baseline
        if not sweep.paired or arm.name != baseline:  # its pairs would all be at 0
            dots[arm.name] = (samples[arm.name].scores - zero).dropna()
        arm_curves = compared(results, arm).curve
        curves[arm.name] = [curve for curve in arm_curves if len(curve.scores)]
    if any(math.isfinite(verdict.difference) for verdict in verdicts.values()):
        plot_differences(
            root / "differences.png", shown, dots, sweep.unit, paired=sweep.paired
        )
        pictures.append("differences.png")
    # A single validation is not a curve.
    if any(len(curve.scores) > 1 for curve in itertools.chain(*curves.values())):
        plot_curves(root / "curves.png", curves, sweep.unit)
        pictures.append("curves.png")
    return pictures
