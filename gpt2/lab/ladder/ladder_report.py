"""The report of a ladder: report.md, report.html, multipliers.csv and a plot."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from gpt2.config import with_options
from gpt2.lab.ablate.judge import compared
from gpt2.lab.ablate.sweep import Sweep
from gpt2.lab.ablate.sweep_tables import tuning_table
from gpt2.lab.experiments.arms import differences
from gpt2.lab.experiments.cells import number, print_table, spread
from gpt2.lab.experiments.curve_plot import BASELINE, COLORS, drawing, visible
from gpt2.lab.experiments.pages import render, write_markdown
from gpt2.lab.experiments.run_folder import count_warnings
from gpt2.lab.ladder.courses import judge_ladder
from gpt2.lab.ladder.multipliers import FARTHEST, STAYS, Course, Interval
from gpt2.lab.ladder.noise import measure_noise
from gpt2.utils.files import write_text
from gpt2.utils.text import format_count, format_duration


def write_report(root: Path, sweeps: Sequence[Sweep]) -> pd.DataFrame:
    """Write all files of the report, and return the table of the arms' courses.

    A course is an arm's multiplier at each size, with its slope, forecast and verdict. All cells
    are strings.
    """
    title = root.resolve().name
    results = [sweep.results() for sweep in sweeps]
    courses = judge_ladder(sweeps, results)
    noise = measure_noise(sweeps, results)
    compute = noise.compute
    rows = _multiplier_rows(sweeps, compute, courses)
    write_text(root / "multipliers.csv", pd.DataFrame(rows).to_csv(index=False))
    pictures = []
    if rows:
        _plot(root / "multipliers.png", compute, courses, sweeps[0].amount)
        pictures.append("multipliers.png")
    table = _course_table(sweeps, courses)
    tuning = {}
    for sweep, result in zip(sweeps, results, strict=True):
        if sweep.tune:
            tuning[sweep.root.name] = tuning_table(sweep, result)
    raised = [sweep.raised_from for sweep in sweeps if sweep.raised_from]
    runs = [run for sweep in sweeps for run in sweep.all_runs()]
    text = render(
        "ladder/ladder.md.j2",
        title=title,
        sweeps=sweeps,
        seeds=sorted({sweep.num_seeds(arm) for sweep in sweeps for arm in sweep.arms}),
        courses=table,
        sizes=_size_table(sweeps, results, noise),
        tuning=tuning,
        raised_from=min(raised, default=0),
        warnings=count_warnings(runs),
        farthest=f"{FARTHEST:g}",
        stays=STAYS,
        has_picture=bool(pictures),
        differences=differences,
    )
    write_markdown(root, title, text, pictures)
    return table


def print_courses(table: pd.DataFrame) -> None:
    """Print the table of `write_report` in 80 columns: a paragraph for each arm."""
    for row in table.to_dict("records"):
        print(f"\n{row.pop('arm')}: {row.pop('verdict')}")
        cells = [(f"  {name}", cell) for name, cell in row.items() if cell]
        if cells:
            print_table(pd.DataFrame(cells, columns=["", "multiplier (interval)"]))
    print(
        "\nmultiplier: the compute with which the baseline reaches the arm's loss, divided\n"
        "by the arm's compute\n"
        "per decade: the factor by which the multiplier changes for ten times the\n"
        f"compute; a multiplier grows if this interval lies above {STAYS:g}, fades if it lies\n"
        f"below 1 / {STAYS:g}, and is constant if it lies between them\n"
        f"at {FARTHEST:g} times: a forecast at {FARTHEST:g} times the largest compute"
    )


def _course_table(
    sweeps: Sequence[Sweep], courses: Mapping[str, Course]
) -> pd.DataFrame:
    """Return a table of strings with a row for each arm.

    A row contains the arm's compute multiplier at each size, with its slope, forecast and verdict.
    """
    rows = []
    for name, course in courses.items():
        row = {"arm": name}
        for i, sweep in enumerate(sweeps):
            cell = ""
            if course.multipliers:
                cell = _cell(course.multipliers[i])
            row[sweep.root.name] = cell
        if course.slope and course.forecast:
            row["per decade"] = _cell(course.slope)
            row[f"at {FARTHEST:g} times"] = " to ".join(
                map(_two_digits, course.forecast)
            )
        row["verdict"] = course.words
        rows.append(row)
    return pd.DataFrame(rows).fillna("")


def _cell(interval: Interval) -> str:
    """Format a multiplier and its interval. Extreme values get two significant digits."""
    texts = []
    for value in interval:
        is_usual = 0.01 <= value < 1000
        texts.append(f"{value:.2f}" if is_usual else _two_digits(value))
    return "{} ({} to {})".format(*texts)


def _two_digits(value: float) -> str:
    """Format a number with two significant digits, without an exponent."""
    return np.format_float_positional(
        value, precision=2, unique=False, fractional=False, trim="-"
    )


def _size_table(
    sweeps: Sequence[Sweep], results: Sequence[pd.DataFrame], noise: pd.DataFrame
) -> pd.DataFrame:
    """Return a table with a row for each size: its options, and the cost and loss of a run."""
    rows = []
    for sweep, table, size in zip(sweeps, results, noise.itertuples(), strict=True):
        baseline = sweep.arms[0]
        config = with_options(baseline.config, sweep.chosen.get(baseline.name, {}))
        runs = compared(table, baseline, "finished")
        row = {
            "size": sweep.root.name,
            "width": str(config.model.embed_dim),
            "heads": str(config.model.num_heads),
            "batch": str(config.data.batch_size),
            "steps": str(config.train.num_steps),
            "rate": f"{config.optim.learning_rate:.3g}",
            "weight decay": f"{config.optim.decay(config.train.num_steps):.3g}",
            "FLOPs": format_count(size.flops) if len(runs) else "",
            "time": format_duration(size.seconds),
            f"loss ({sweep.unit})": spread(runs.score),
            "deviation of a difference": number(size.pair, ".4f"),
        }
        rows.append(row)
    return pd.DataFrame(rows)


def _multiplier_rows(
    sweeps: Sequence[Sweep], compute: Sequence[float], courses: Mapping[str, Course]
) -> list[dict[str, object]]:
    """Return the rows of multipliers.csv: one for each size of each arm that has multipliers.

    `compute` is the baseline's mean compute at each size.
    """
    rows = []
    for name, course in courses.items():
        for i, multiplier in enumerate(course.multipliers):
            row = {
                "arm": name,
                "size": sweeps[i].root.name,
                "compute": compute[i],
                "multiplier": multiplier.value,
                "low": multiplier.low,
                "high": multiplier.high,
                "verdict": course.words,
            }
            rows.append(row)
    return rows


def _plot(
    png: Path, compute: Sequence[float], courses: Mapping[str, Course], amount: str
) -> None:
    """Plot multipliers with intervals against compute, and the range of each forecast.

    `compute` is the baseline's mean compute at each size. `amount` states its unit: `flops` or
    `seconds`.
    """
    with drawing(png, height=5.5) as (axes,):
        axes.axhline(1, color=BASELINE, linewidth=1.2)
        for i, (name, course) in enumerate(courses.items()):
            if not course.forecast:
                continue
            color = COLORS[i % len(COLORS)]
            # Arms are shifted sideways, so that error bars do not cover each other.
            shift = 1.06 ** (i - (len(courses) - 1) / 2)
            x = np.array(compute) * shift
            value, low, high = np.array(course.multipliers).T
            axes.errorbar(
                x,
                value,
                yerr=(value - low, high - value),
                fmt="o-",
                color=color,
                capsize=3,
                label=f"{visible(name)}: {course.words}",
            )
            far = FARTHEST * x[-1]
            axes.plot([far, far], course.forecast, color=color, linewidth=5, alpha=0.4)
        axes.set_xscale("log")
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        ticks = [10.0**n for n in range(-9, 10)]
        if high < 4 * low:
            digits = (1, 1.1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
            ticks = [power * digit for power in ticks for digit in digits]
        elif 0.1 < low < high < 50:
            ticks = [0.25, 0.5, 1, 2, 4, 8, 16]
        shown = [tick for tick in ticks if low < tick < high]
        axes.set_yticks(shown, [f"{tick:g}" for tick in shown])
        axes.yaxis.set_minor_formatter("")
        # The default labels are TeX formulas, but `drawing` does not typeset formulas.
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0e}")
        title = "seconds of training steps" if amount == "seconds" else "training FLOPs"
        axes.set_xlabel(
            f"{title}\nbars with caps: intervals; pale bars without caps: forecasts at"
            f" {FARTHEST:g} times the largest compute"
        )
        axes.set_ylabel("compute multiplier; higher is better")
