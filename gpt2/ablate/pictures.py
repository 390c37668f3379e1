"""The pictures of a sweep: differences with intervals, curves, and losses against what is tuned."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.ablate.arms import Arm
from gpt2.ablate.results import Curve
from gpt2.ablate.terms import flops
from gpt2.ablate.verdicts import Verdict

# Of arms, in their order; the baseline is grey. Told apart by people who do not tell red from green
# (Okabe and Ito 2008); the pattern of the line changes when they run out.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31")
_LINES = ("-", "--", ":", "-.")
_BASELINE = "#4b5563"
_MUTED = "#6b7280"
_VERDICTS = {"better": "#009e73", "worse": "#d55e00"}


def plot_differences(
    png: Path,
    verdicts: Mapping[str, Verdict],
    scores: Mapping[str, Sequence[float]],
    unit: str,
) -> None:
    """Draws each arm's difference from the baseline, with its interval and its runs.

    `scores` are final ones less the baseline's mean. A baseline, without a verdict, has runs alone.
    """
    places = {
        name: verdicts[name].difference if name in verdicts else 0.0 for name in scores
    }
    names = sorted(places, key=places.__getitem__, reverse=True)
    figure, (axes,) = _figure(height=1.4 + 0.42 * len(names))
    axes.axvline(0, color=_BASELINE, linewidth=1.2)
    for row, name in enumerate(names):
        verdict = verdicts.get(name)
        color = _VERDICTS.get(verdict.words, _MUTED) if verdict else _BASELINE
        below = [row - 0.2] * len(scores[name])  # where the bar does not hide them
        axes.plot(
            scores[name], below, "o", color=color, alpha=0.6, ms=5, markeredgewidth=0
        )
        if verdict:
            if math.isfinite(verdict.low):
                axes.plot(
                    [verdict.low, verdict.high], [row, row], color=color, linewidth=2.4
                )
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

    Curves are by name, the baseline first, one for each seed; size by size, told by their pattern.
    A single validation is a dot, to which the training loss leads. One without tokens is a level.
    """
    from matplotlib.ticker import EngFormatter

    figure, panels = _figure(height=4.6 + 0.12 * len(curves), width=14, columns=3)
    num_arms = len(curves) // num_sizes
    styles = [_style(i % num_arms, i // num_arms) for i in range(len(curves))]
    titles = {
        "tokens": "tokens",
        "flops": "FLOPs",
        "seconds": "seconds of training steps",
    }
    for axes, (amount, title) in zip(panels, titles.items(), strict=True):
        for (name, members), style in zip(curves.items(), styles, strict=True):
            if any(np.isnan(curve.tokens).any() for curve in members):
                axes.axhline(members[0].scores[0], label=name, **style)
                continue
            known = [
                c
                for c in members
                if np.isfinite(getattr(c, amount)).all() and len(c.scores)
            ]
            if not known:
                continue
            # Curves of one arm are validated at the same steps; a shorter one has not come as far.
            number = min(len(curve.scores) for curve in known)
            x = np.mean([getattr(curve, amount)[:number] for curve in known], axis=0)
            scores = np.array([curve.scores[:number] for curve in known])
            mark = "o" if number == 1 else ""
            for loss in filter(None, (curve.training for curve in known)):
                axes.plot(getattr(loss, amount), loss.scores, **style, alpha=0.3)
            axes.plot(x, scores.mean(0), marker=mark, label=name, **style)
            axes.fill_between(
                x, scores.min(0), scores.max(0), color=style["color"], alpha=0.18
            )
        axes.set_xlabel(title)
        axes.set_xscale("log" if log_x else "linear")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    every = [c for members in curves.values() for c in members]
    training = [c.training for c in every if c.training]
    told = "faint: training" if training else "band: range of seeds"
    panels[0].set_ylabel(f"validation ({unit}); {told}")
    shown = np.concatenate(
        [c.scores[len(c.scores) // 10 :] for c in [*every, *training]]
    )
    margin = 0.06 * np.ptp(shown) or 0.1
    panels[0].set_ylim(shown.min() - margin, shown.max() + margin)
    _save(figure, png)


def plot_tuning(
    png: Path, option: str, means: Mapping[str, Mapping[float, float]], unit: str
) -> None:
    """Draws the mean score by arm and value of an option that was tuned; nan: diverged."""
    figure, (axes,) = _figure(height=4.8 + 0.15 * len(means))
    for i, (name, by_value) in enumerate(means.items()):
        values, scores = zip(*sorted(by_value.items()), strict=True)
        axes.plot(values, scores, marker="o", markersize=4, label=name, **_style(i))
    axes.set_xscale("log" if min(values) > 0 else "linear")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.set_xticks([], minor=True)
    axes.set(xlabel=option, ylabel=f"final validation ({unit})")
    _save(figure, png)


def plot_sizes(
    png: Path,
    groups: Sequence[Sequence[Arm]],
    verdicts: Mapping[str, Verdict],
    unit: str,
) -> None:
    """Draws each change's differences, with their intervals, over the baseline's FLOPs by size."""
    changes = list(dict.fromkeys(arm.change for _, *arms in groups for arm in arms))
    figure, (axes,) = _figure(height=4.8 + 0.15 * len(changes))
    axes.axhline(0, color=_BASELINE, linewidth=1.2)
    places = [flops(first.config, first.config.train.num_steps) for first, *_ in groups]
    for i, change in enumerate(changes, start=1):
        each = zip(places, groups, strict=True)
        found = [
            (x, verdicts[a.name])
            for x, arms in each
            for a in arms[1:]
            if a.change == change
        ]
        x, middles, highs = np.array([(x, v.difference, v.high) for x, v in found]).T
        x = x * 1.03 ** (i - len(changes) / 2)  # beside others' bars
        axes.errorbar(
            x, middles, highs - middles, fmt="D", label=change, color=_style(i)["color"]
        )
    axes.set(xscale="log", xlabel="size, over its baseline's FLOPs")
    axes.set_xticks(places, [first.size for first, *_ in groups])
    axes.set_xticks([], minor=True)
    axes.set_ylabel(f"difference from the baseline ({unit})")
    _save(figure, png)


def _style(arm: int, size: int = 0) -> dict[str, str]:
    turn, color = divmod(arm - 1, len(_COLORS)) if arm else (0, -1)
    line = _LINES[(turn + size) % len(_LINES)]
    return {"color": (*_COLORS, _BASELINE)[color], "linestyle": line}


def _figure(height: float, width: float = 9, columns: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.figure import (
        Figure,  # without pyplot: no window system, no global state
    )

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    panels = list(np.ravel(figure.subplots(1, columns, sharey=True)))
    for axes in panels:
        axes.grid(alpha=0.3)
    return figure, panels


def _save(figure: Any, png: Path) -> None:
    """Writes a picture, with the names of its curves below, where they hide nothing."""
    handles = figure.axes[0].get_legend_handles_labels()
    columns = int(figure.get_figwidth() / 4.5)
    figure.legend(*handles, fontsize=9, loc="outside lower left", ncols=columns)
    figure.savefig(png)
