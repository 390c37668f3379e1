"""The plot of the differences between a sweep's arms and its baseline."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from gpt2.lab.ablate.verdicts import Verdict
from gpt2.lab.experiments.curve_plot import BASELINE, GREEN, GREY, RED, drawing
from gpt2.lab.experiments.decisions import Decision

_COLORS: dict[str, str] = {Decision.BETTER: GREEN, Decision.WORSE: RED}


def plot_differences(
    png: Path,
    verdicts: Mapping[str, Verdict],
    scores: Mapping[str, pd.Series],
    unit: str,
    *,
    paired: bool,
) -> None:
    """Plot each arm's difference from the baseline, with its interval and a dot for each run.

    `verdicts` also contains the baseline, with a difference of 0. `scores` maps the baseline and
    each arm to the final scores of its runs, minus the mean score of the baseline. In a paired
    sweep, the baseline's score of the same seed is subtracted instead, and `scores` contains only
    the arms. `unit` is the unit of the scores.
    """
    names = sorted(verdicts, key=lambda name: verdicts[name].difference, reverse=True)
    with drawing(png, height=1.4 + 0.42 * len(names)) as (axes,):
        axes.axvline(0, color=BASELINE, linewidth=1.2)
        for row, name in enumerate(names):
            verdict = verdicts[name]
            color = _COLORS.get(verdict.words, GREY)
            half_width = verdict.high - verdict.difference
            axes.errorbar(
                verdict.difference, row, xerr=half_width, fmt="D", color=color
            )
            # The dots are a little below the arm's error bar, which would otherwise hide them.
            dots = scores.get(name, pd.Series())
            heights = np.full(len(dots), row - 0.2)
            axes.plot(dots, heights, "o", color=color, alpha=0.6, markersize=5)
        labels = [name.replace(",", ",\n") for name in names]
        axes.set_yticks(range(len(names)), labels)
        axes.margins(y=0.15)
        axes.set_xlabel(
            f"difference from the baseline ({unit}); lower is better\n"
            f"diamonds: means with intervals; dots: {'pairs' if paired else 'runs'}"
        )
