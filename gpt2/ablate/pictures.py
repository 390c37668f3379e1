"""The pictures of a sweep: differences with intervals, curves, and losses against what is tuned."""

import math
from collections.abc import Callable, Mapping, Sequence
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
_BETTER, _WORSE, _NEITHER = "#009e73", "#d55e00", "#6b7280"
_BELOW = 0.2  # of the distance between two rows
_PALE = 0.18  # how dense the range of seeds is
_LONGEST_LINE = 32  # characters


def plot_differences(
    png: Path, verdicts: Mapping[str, Verdict], scores: Mapping[str, Sequence[float]], unit: str
) -> None:
    """Draws each arm's difference from the baseline, with its interval and its runs.

    Args:
        png: where the picture goes.
        verdicts: by arm, with a difference each.
        scores: final scores of the runs of each arm, less the baseline's mean. A name without a
            verdict is that of a baseline, whose runs are drawn alone.
        unit: of scores.
    """
    places = {name: verdicts[name].difference if name in verdicts else 0.0 for name in scores}
    names = sorted(sorted(places), key=places.__getitem__, reverse=True)
    figure, (axes,) = _figure(height=1.4 + 0.42 * len(names))
    axes.axvline(0, color=_BASELINE, linewidth=1.2)
    for row, name in enumerate(names):
        verdict = verdicts.get(name)
        color = _BASELINE
        if verdict:
            color = {"better": _BETTER, "worse": _WORSE}.get(verdict.words, _NEITHER)
        below = [row - _BELOW] * len(scores[name])  # where the bar does not hide them
        axes.plot(scores[name], below, "o", color=color, alpha=0.6, ms=5, markeredgewidth=0)
        if verdict is None:
            continue
        if math.isfinite(verdict.low):
            axes.plot([verdict.low, verdict.high], [row, row], color=color, linewidth=2.4)
        axes.plot([verdict.difference], [row], "D", color=color, markersize=6)
    axes.set_yticks(range(len(names)), [_wrapped(name) for name in names])
    axes.set_ylim(-0.7, len(names) - 0.3)
    axes.set_xlabel(f"difference from the baseline ({unit}); lower is better")
    axes.grid(axis="x", color=_GRID, linewidth=0.8)
    figure.savefig(png)


def plot_curves(
    png: Path,
    curves: Mapping[str, Sequence[Curve]],
    unit: str,
    *,
    log_x: bool = False,
    looks: Mapping[str, tuple[int, int]] | None = None,
) -> None:
    """Draws the mean of each arm's curves, and their range, over tokens, FLOPs and seconds.

    Args:
        png: where the picture goes.
        curves: by name, the baseline first; one for each seed.
        unit: of scores.
        log_x: amounts are drawn as logarithms, for runs of very different lengths.
        looks: the numbers of each curve's color and of its pattern, color 0 being the baseline's;
            by their order, if not given.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    figure, panels = _figure(height=4.6 + 0.12 * len(curves), width=14, columns=3)
    amounts: tuple[tuple[str, Callable[[float], str]], ...] = (
        ("tokens", format_count),
        ("flops", format_count),
        ("seconds", _write_seconds),
    )
    curves = {name: [c for c in members if len(c.scores)] for name, members in curves.items()}
    no_lines = all(_num_common(members) == 1 for members in curves.values() if members)
    styles = {name: _style(i) for i, name in enumerate(curves)}
    for name, (number, pattern) in (looks or {}).items():
        styles[name] = _style(number)[0], _LINES[pattern % len(_LINES)]
    for axes, (amount, write) in zip(panels, amounts, strict=True):
        known = {name: [c for c in each if _has(c, amount)] for name, each in curves.items()}
        bands = {name: _band(each, amount) for name, each in known.items() if each}
        beside = _side_by_side({name: x for name, (x, *_) in bands.items()})
        for name, (x, low, mean, high) in bands.items():
            (color, line), label = styles[name], _wrapped(name)
            if len(x) == 1:
                label += "" if no_lines else "\n(one validation)"
                _draw_point(axes, beside.get(name, 0.0), x, (low, mean, high), color, label)
                continue
            axes.plot(x, mean, line, color=color, linewidth=1.8, label=label)
            if len(known[name]) > 1:
                axes.fill_between(x, low, high, color=color, alpha=_PALE, linewidth=0)
        title = {"flops": "FLOPs", "seconds": "time in training steps"}.get(amount, amount)
        axes.set_xlabel(f"{title} (the same for all, side by side)" if beside else title)
        if beside:
            axes.margins(x=0.25)
        if log_x:
            axes.set_xscale("log")
            left, right = axes.get_xlim()
            # Powers of ten alone may all be outside.
            subs = (1,) if right > 30 * left else (1, 2, 5)
            axes.xaxis.set_major_locator(LogLocator(subs=subs, numticks=6))
            axes.xaxis.set_minor_formatter(NullFormatter())
        else:
            axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
            axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(lambda value, _, write=write: write(value))
        axes.grid(color=_GRID, linewidth=0.8)
    if any(len(members) > 1 for members in curves.values()):
        panels[0].fill_between(
            [], [], color=_MUTED, alpha=_PALE, linewidth=0, label="range of seeds"
        )
    panels[0].set_ylabel(f"validation ({unit})")
    panels[0].set_ylim(*_frame([curve.scores for members in curves.values() for curve in members]))
    for axes in panels[1:]:
        axes.sharey(panels[0])
    _add_legend(figure, panels[0])
    figure.savefig(png)


def plot_tuning(
    png: Path, option: str, means: Mapping[str, Mapping[float, float]], unit: str
) -> None:
    """Draws final scores against the values of an option that was tuned, a line for each arm.

    Args:
        png: where the picture goes.
        option: its name.
        means: by arm and value, the mean score; nan where a run diverged or failed.
        unit: of scores.
    """
    figure, (axes,) = _figure(height=4.8 + 0.15 * len(means))
    for i, (name, by_value) in enumerate(means.items()):
        values = sorted(by_value)
        scores = np.array([by_value[value] for value in values])
        color, line = _style(i)
        axes.plot(values, scores, line, marker="o", color=color, markersize=4, label=_wrapped(name))
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
    axes.grid(color=_GRID, linewidth=0.8)
    _add_legend(figure, axes)
    figure.savefig(png)


def plot_scaling(
    png: Path, points: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], unit: str
) -> None:
    """Draws final scores against compute, with the power law of each arm.

    Args:
        png: where the picture goes.
        points: (FLOPs, final score) of each run, by arm and size.
        unit: of scores.
    """
    figure, (axes,) = _figure(height=4.8 + 0.15 * len(points))
    for i, (name, by_size) in enumerate(points.items()):
        flops, scores = np.array([run for runs in by_size.values() for run in runs]).T
        color, line = _style(i)
        grid = np.geomspace(flops.min(), flops.max(), 50)
        label = _wrapped(name)
        axes.plot(grid, fit_power_law(flops, scores).loss(grid), line, color=color, label=label)
        axes.plot(flops, scores, "o", color=color, markersize=4, alpha=0.6)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:.2f}")
    axes.yaxis.set_minor_formatter("{x:.2f}")
    axes.set_xlabel("FLOPs, by the model's formula")
    axes.set_ylabel(f"final validation ({unit})")
    axes.grid(color=_GRID, linewidth=0.8, which="both")
    _add_legend(figure, axes)
    figure.savefig(png)


def _has(curve: Curve, amount: str) -> bool:
    """Whether a curve has points, and says how much of an amount each took."""
    return len(curve.scores) > 0 and bool(np.isfinite(getattr(curve, amount)).all())


def _band(curves: Sequence[Curve], amount: str) -> tuple[np.ndarray, ...]:
    """Returns the mean amount at each validation, and the lowest, mean and highest score there.

    Curves of one arm are validated at the same steps; a shorter one has not come as far.
    """
    number = _num_common(curves)
    amounts = np.stack([getattr(curve, amount)[:number] for curve in curves])
    scores = np.stack([curve.scores[:number] for curve in curves])
    return amounts.mean(axis=0), scores.min(axis=0), scores.mean(axis=0), scores.max(axis=0)


def _side_by_side(places: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns how far each mark stands beside its place, in points, where all have the same.

    Marks over each other would hide all but the last. Empty if there are lines or other places.
    """
    amounts = [x[0] for x in places.values()]
    if any(len(x) > 1 for x in places.values()) or len(places) < 2:
        return {}
    if max(amounts) > 1.01 * min(amounts):
        return {}
    step = min(10, 100 / len(places))
    return {name: step * (i - (len(places) - 1) / 2) for i, name in enumerate(places)}


def _draw_point(
    axes: Any, beside: float, x: np.ndarray, scores: Sequence[np.ndarray], color: str, label: str
) -> None:
    """Draws an arm of one validation, of which a line would not be seen.

    Args:
        axes: to draw in.
        beside: how far to the right of its place, in points.
        x: its place, `[1]`.
        scores: the lowest, the mean and the highest, `[1]` each.
        color: of the arm.
        label: in the legend.
    """
    from matplotlib.transforms import ScaledTranslation

    low, mean, high = scores
    marks = axes.plot(x, mean, "o", color=color, ms=8, mec="white", zorder=3, label=label)
    marks += axes.plot([x, x], [low, high], color=color, linewidth=8, alpha=_PALE)
    shift = ScaledTranslation(beside / 72, 0, axes.figure.dpi_scale_trans)
    for mark in marks:  # moved once it is drawn, since limits follow from where that was
        mark.set(transform=axes.transData + shift, clip_on=False)


def _num_common(curves: Sequence[Curve]) -> int:
    """Returns how many validations all curves of an arm have."""
    return min(len(curve.scores) for curve in curves)


def _write_seconds(seconds: float) -> str:
    return f"{seconds:g}s" if seconds < 10 else format_duration(seconds)


def _frame(scores: Sequence[np.ndarray]) -> tuple[float, float]:
    """Returns limits that show the later nine tenths of all curves."""
    shown = [each[len(each) // 10 :] for each in scores if len(each)]
    if not shown:
        return 0.0, 1.0
    low, high = min(each.min() for each in shown), max(each.max() for each in shown)
    margin = 0.06 * (high - low) or 0.1
    return low - margin, high + margin


def _style(index: int) -> tuple[str, str]:
    if index == 0:
        return _BASELINE, "-"
    turn, color = divmod(index - 1, len(_COLORS))
    return _COLORS[color], _LINES[turn % len(_LINES)]


def _wrapped(name: str) -> str:
    """Returns a name in lines of about equal length, broken behind commas."""
    lines = [""]
    for part in name.replace(",", ",\n").split("\n"):
        if lines[-1] and len(lines[-1]) + len(part) > _LONGEST_LINE:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _add_legend(figure: Any, axes: Any) -> None:
    """Names the curves below the picture, where they hide nothing."""
    lines, names = axes.get_legend_handles_labels()
    longest = max((len(line) for name in names for line in name.split("\n")), default=1)
    width = 0.6 + 0.075 * longest  # inches, at this size of letters
    columns = max(1, min(len(names), int(figure.get_figwidth() / width)))
    figure.legend(lines, names, frameon=False, fontsize=9, loc="outside lower left", ncols=columns)


def _figure(height: float, width: float = 9, columns: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    panels = list(np.ravel(figure.subplots(1, columns)))
    for axes in panels:
        axes.set_axisbelow(True)
        axes.spines[:].set_visible(False)
        axes.tick_params(color=_MUTED, labelcolor=_MUTED)
    return figure, panels
