"""The pictures of a sweep: differences with intervals, and curves."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpt2.lab.ablate.journal import Idea
from gpt2.lab.ablate.results import AMOUNTS, Curve
from gpt2.lab.ablate.verdicts import Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of arms, in their order; the baseline is grey. Told apart by people who do not tell red from green
# (Okabe and Ito 2008); the pattern of the line changes when they run out.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31")
_LINES = ("-", "--", ":", "-.")
_BASELINE = "#4b5563"
_MUTED = "#6b7280"
_VERDICTS = {"better": "#009e73", "worse": "#d55e00"}
_ANSWERS = {
    "keep": "#009e73",
    "discard": _MUTED,
    "undecided": "#e69f00",
    "failed": "#d55e00",
}


def plot_differences(
    png: Path,
    verdicts: Mapping[str, Verdict],
    scores: Mapping[str, np.ndarray],
    unit: str,
) -> None:
    """Draws each arm's difference from the baseline, with its interval and its runs.

    `scores` are final ones less the baseline's mean. The baseline's difference is 0.
    """

    def place(name: str) -> float:
        return verdicts[name].difference

    names = sorted(verdicts, key=place, reverse=True)
    height = 1.4 + 0.42 * len(names)
    figure, (axes,) = _figure(height)
    axes.axvline(0, color=_BASELINE, linewidth=1.2)
    for row, name in enumerate(names):
        verdict = verdicts[name]
        color = _VERDICTS.get(verdict.words, _MUTED)
        middle = verdict.difference
        half_width = verdict.high - middle
        axes.errorbar(middle, row, xerr=half_width, fmt="D", color=color)
        dots = scores[name]
        below = np.full(len(dots), row - 0.2)  # where the bar does not hide them
        axes.plot(
            dots,
            below,
            "o",
            color=color,
            alpha=0.6,
            markersize=5,
        )
    labels = [name.replace(",", ",\n") for name in names]
    axes.set_yticks(range(len(names)), labels)
    axes.margins(y=0.15)
    axes.set_xlabel(f"difference from the baseline ({unit}); lower is better")
    figure.savefig(png)


def plot_curves(
    png: Path,
    curves: Mapping[str, Sequence[Curve]],
    unit: str,
) -> None:
    """Draws the mean of each arm's curves, and their range, over tokens, FLOPs and seconds.

    Curves are by name, the baseline first, one for each seed, with validations. A single one is a
    dot. A curve without tokens is a level.
    """
    height = 4.6 + 0.12 * len(curves)
    figure, panels = _figure(height, width=14, columns=3)
    styles = [("-", _BASELINE), *itertools.product(_LINES, _COLORS)]
    for axes, (amount, title) in zip(panels, AMOUNTS.items(), strict=True):
        for name, (line, color) in zip(curves, itertools.cycle(styles), strict=False):
            members = curves[name]
            is_level = any(np.isnan(curve.tokens).any() for curve in members)
            if is_level:
                level = members[0].scores[0]
                axes.axhline(level, label=name, color=color, linestyle=line)
                continue
            # Curves of one arm are validated at the same steps; a shorter one has not come as far.
            number = min(len(curve.scores) for curve in members)
            amounts = [getattr(curve, amount)[:number] for curve in members]
            x = np.mean(amounts, axis=0)
            y = np.array([curve.scores[:number] for curve in members])
            marker = "o" if number == 1 else ""
            mean = y.mean(0)
            axes.plot(
                x,
                mean,
                marker=marker,
                label=name,
                color=color,
                linestyle=line,
            )
            axes.fill_between(
                x,
                y.min(0),
                y.max(0),
                color=color,
                alpha=0.18,
            )
        axes.set_xlabel(title)
    # What lies high at first would leave little room for the rest.
    shown = list[float]()
    for curve in itertools.chain(*curves.values()):
        skipped = len(curve.scores) // 10
        shown.extend(curve.scores[skipped:])
    panels[0].set_ylim(top=1.02 * max(shown))
    panels[0].set_ylabel(f"validation ({unit}); band: range of seeds")
    _save(figure, png)


def plot_ledger(png: Path, ideas: Sequence[Idea], gains: Mapping[int, float]) -> None:
    """Draws ideas with their intervals, in their order, and the best so far as a line.

    `gains` are differences of the best from the start, by its number. What has no score is a cross.
    """
    figure, (axes,) = _figure(5)
    numbers = [*gains, len(ideas) + 0.5]
    losses = [*gains.values(), min(gains.values())]
    axes.step(numbers, losses, where="post", color=_BASELINE, label="the best so far")
    for answer, color in _ANSWERS.items():
        axes.plot([], [], "o", color=color, label=answer)
    for idea in ideas:
        color = _ANSWERS.get(idea.answer, _BASELINE)  # of one that is open
        difference, low, _ = idea.interval
        place = gains[idea.best] + np.nan_to_num(difference)
        error = np.nan_to_num(difference - low, posinf=0.0)
        marker = "o" if idea.pairs else "x"
        axes.errorbar(
            idea.number,
            place,
            yerr=error,
            fmt=marker,
            color=color,
        )
        if idea.number in gains:  # below the line nothing else is drawn
            axes.text(
                idea.number,
                place,
                f"{idea.text}  ",
                ha="right",
                va="top",
                rotation=30,
                rotation_mode="anchor",
            )
    axes.margins(y=0.3)  # room for names
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("idea")
    axes.set_ylabel("nats per token, from the start")
    _save(figure, png)


def _figure(
    height: float, width: float = 9, columns: int = 1
) -> tuple["Figure", list["Axes"]]:
    # Without pyplot: no window system, no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    (panels,) = figure.subplots(1, columns, sharey=True, squeeze=False)
    for axes in panels:
        axes.grid(alpha=0.3)
    return figure, panels


def _save(figure: "Figure", png: Path) -> None:
    """Writes a picture, with the names of its curves below, where they hide nothing."""
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, fontsize=9, loc="outside lower left", ncols=3)
    figure.savefig(png)
