"""The pictures of a sweep: differences with intervals, curves, and losses against what is tuned."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.ablate.results import Curve
from gpt2.ablate.scaling import fit_power_law
from gpt2.ablate.verdicts import Verdict
from gpt2.utils.text import format_count, format_duration

# Of arms, in their order; the baseline is grey. Told apart by people who do not tell red from green
# (Okabe and Ito 2008); the pattern of the line changes when they run out.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31")
_LINES = ("-", "--", ":", "-.")
_BASELINE, _MUTED, _GRID = "#4b5563", "#6b7280", "#e5e7eb"
_VERDICTS = {"better": "#009e73", "worse": "#d55e00"}
_PALE = 0.18  # how dense the range of seeds is
_LETTER = 0.075  # inches


def plot_differences(
    png: Path, verdicts: Mapping[str, Verdict], scores: Mapping[str, Sequence[float]], unit: str
) -> None:
    """Draws each arm's difference from the baseline, with its interval and its runs.

    `scores` are final ones less the baseline's mean. A baseline, without a verdict, has runs alone.
    """
    places = {name: verdicts[name].difference if name in verdicts else 0.0 for name in scores}
    names = sorted(places, key=places.__getitem__, reverse=True)
    figure, (axes,) = _figure(height=1.4 + 0.42 * len(names))
    axes.axvline(0, color=_BASELINE, linewidth=1.2)
    for row, name in enumerate(names):
        verdict = verdicts.get(name)
        color = _VERDICTS.get(verdict.words, _MUTED) if verdict else _BASELINE
        below = [row - 0.2] * len(scores[name])  # where the bar does not hide them
        axes.plot(scores[name], below, "o", color=color, alpha=0.6, ms=5, markeredgewidth=0)
        if verdict:
            if math.isfinite(verdict.low):
                axes.plot([verdict.low, verdict.high], [row, row], color=color, linewidth=2.4)
            axes.plot([verdict.difference], [row], "D", color=color, markersize=6)
    axes.set_yticks(range(len(names)), [name.replace(",", ",\n") for name in names])
    axes.set_ylim(-0.7, len(names) - 0.3)
    axes.set_xlabel(f"difference from the baseline ({unit}); lower is better")
    figure.savefig(png)


def plot_curves(
    png: Path,
    curves: Mapping[str, Sequence[Curve]],
    unit: str,
    *,
    log_x: bool = False,
    num_sizes: int = 1,
) -> None:
    """Draws the mean of each arm's curves, and their range, over tokens, FLOPs and seconds.

    Curves are by name, the baseline first, one for each seed; at several sizes, size by size, which
    share a color by arm and a pattern by size. `log_x` is for runs of very different lengths.
    """
    from matplotlib.ticker import LogLocator

    figure, panels = _figure(height=4.6 + 0.12 * len(curves), width=14, columns=3)
    num_arms = len(curves) // num_sizes
    styles = {name: _style(i % num_arms, i // num_arms) for i, name in enumerate(curves)}
    titles = {"tokens": "tokens", "flops": "FLOPs", "seconds": "time in training steps"}
    for axes, (amount, title) in zip(panels, titles.items(), strict=True):
        for name, members in curves.items():
            known = [c for c in members if np.isfinite(getattr(c, amount)).all() and len(c.scores)]
            if not known:
                continue
            # Curves of one arm are validated at the same steps; a shorter one has not come as far.
            number = min(len(curve.scores) for curve in known)
            x = np.mean([getattr(curve, amount)[:number] for curve in known], axis=0)
            scores = np.array([curve.scores[:number] for curve in known])
            color, line = styles[name]
            mark = "o" if number == 1 else ""  # a single validation makes no line
            axes.plot(x, scores.mean(0), line, marker=mark, color=color, label=name)
            if len(known) > 1:
                low, high = scores.min(0), scores.max(0)
                axes.fill_between(x, low, high, color=color, alpha=_PALE, linewidth=0)
                if number == 1:
                    axes.vlines(x, low, high, color=color, alpha=0.5)
        axes.set_xlabel(title)
        if log_x:
            axes.set_xscale("log")
            left, right = axes.get_xlim()
            subs = (1,) if right > 30 * left else (1, 2, 5)  # powers of ten may all be outside
            axes.xaxis.set_major_locator(LogLocator(subs=subs, numticks=6))
            axes.xaxis.set_minor_formatter("")
        else:
            axes.locator_params(axis="x", nbins=5)
            axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(_seconds if amount == "seconds" else _count)
        if axes is not panels[0]:
            axes.sharey(panels[0])
    panels[0].set_ylabel(f"validation ({unit}); band: range of seeds")
    # The later nine tenths of all curves.
    shown = [c.scores[len(c.scores) // 10 :] for members in curves.values() for c in members]
    low, high = np.min(np.concatenate(shown)), np.max(np.concatenate(shown))
    margin = 0.06 * (high - low) or 0.1
    panels[0].set_ylim(low - margin, high + margin)
    _add_legend(figure, panels[0])
    figure.savefig(png)


def plot_tuning(
    png: Path, option: str, means: Mapping[str, Mapping[float, float]], unit: str
) -> None:
    """Draws the mean score by arm and value of an option that was tuned; nan: diverged."""
    figure, (axes,) = _figure(height=4.8 + 0.15 * len(means))
    for i, (name, by_value) in enumerate(means.items()):
        values = sorted(by_value)
        scores = np.array([by_value[value] for value in values])
        color, line = _style(i)
        axes.plot(values, scores, line, marker="o", color=color, markersize=4, label=name)
        if np.isfinite(scores).any():
            best = int(np.nanargmin(scores))
            axes.plot(values[best], scores[best], "o", color=color, markersize=9, mfc="none")
    tried = sorted({value for by_value in means.values() for value in by_value})
    if tried[0] > 0:
        axes.set_xscale("log")
    axes.set_xticks(tried, [f"{value:g}" for value in tried])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(f"{option} (a ring around each arm's best)")
    axes.set_ylabel(f"final validation ({unit})")
    _add_legend(figure, axes)
    figure.savefig(png)


def plot_scaling(png: Path, points: Mapping[str, Sequence[tuple[float, float]]], unit: str) -> None:
    """Draws (FLOPs, final score) of each arm's runs, with their power law."""
    figure, (axes,) = _figure(height=4.8 + 0.15 * len(points))
    for i, (name, runs) in enumerate(points.items()):
        flops, scores = np.array(runs).T
        color, line = _style(i)
        grid = np.geomspace(flops.min(), flops.max(), 50)
        law = fit_power_law(flops, scores).loss(grid)
        axes.plot(grid, law, line, color=color, label=name)
        axes.plot(flops, scores, "o", color=color, markersize=4, alpha=0.6)
    axes.set(xscale="log", yscale="log")
    axes.yaxis.set_major_formatter("{x:.2f}")
    axes.yaxis.set_minor_formatter("{x:.2f}")
    axes.set_xlabel("FLOPs, by the model's formula")
    axes.set_ylabel(f"final validation ({unit})")
    _add_legend(figure, axes)
    figure.savefig(png)


def _count(value: float, _: object) -> str:
    return format_count(value)


def _seconds(value: float, _: object) -> str:
    return f"{value:g}s" if value < 10 else format_duration(value)


def _style(arm: int, size: int = 0) -> tuple[str, str]:
    turn, color = divmod(arm - 1, len(_COLORS)) if arm else (0, -1)
    return (*_COLORS, _BASELINE)[color], _LINES[(turn + size) % len(_LINES)]


def _add_legend(figure: Any, axes: Any) -> None:
    """Names the curves below the picture, where they hide nothing."""
    lines, names = axes.get_legend_handles_labels()
    longest = max(map(len, names), default=1)
    columns = max(1, min(len(names), int(figure.get_figwidth() / (0.6 + _LETTER * longest))))
    figure.legend(lines, names, frameon=False, fontsize=9, loc="outside lower left", ncols=columns)


def _figure(height: float, width: float = 9, columns: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    panels = list(np.ravel(figure.subplots(1, columns)))
    for axes in panels:
        axes.set_axisbelow(True)
        axes.spines[:].set_visible(False)
        axes.tick_params(color=_MUTED, labelcolor=_MUTED)
        axes.grid(color=_GRID, linewidth=0.8, which="both")
    return figure, panels
