"""The picture of a comparison: tokens per second, and how many times faster, by batch size."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt2.benchmark.measure import OURS
from gpt2.utils.text import counted, format_count

# Told apart by people who do not tell red from green (Okabe and Ito 2008).
_COLORS = ("#0072b2", "#e69f00", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#8c6d31")
# Where the axis of ratios has lines, by how many times its end is its beginning.
_RATIOS = {
    4: (0.25, 0.5, 0.8, 1, 1.25, 1.5, 2, 3),
    50: (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20),
    math.inf: (0.001, 0.01, 0.1, 1, 10, 100, 1000),
}
_MUTED, _GRID, _TEXT = "#6b7280", "#e5e7eb", "#374151"


def plot(png: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draws a column for each compute type, with speeds above and ratios below.

    A bar is the median turn, and its whiskers are the slowest and the fastest. A ratio has its 95 %
    interval.

    Args:
        png: where the picture goes.
        rows: from `gpt2.benchmark.tables.rows`, of one case or more.
    """
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    types = list(dict.fromkeys(row["compute"] for row in rows))
    contestants = list(dict.fromkeys(row["contestant"] for row in rows))
    compared = [name for name in contestants if name != OURS]
    colors = {name: _COLORS[i % len(_COLORS)] for i, name in enumerate(contestants)}
    with matplotlib.rc_context({"font.size": 11, "font.family": "sans-serif"}):
        figure = Figure(
            figsize=(max(7.0, 5.0 * len(types)), 7.6 if compared else 4.8),
            dpi=150,
            layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1),
        )
        shape: dict[str, Any] = dict(sharey="row", squeeze=False)
        if compared:
            shape["height_ratios"] = (3, 2)
        panels = figure.subplots(2 if compared else 1, len(types), **shape)
        for column, compute in enumerate(types):
            chosen = [row for row in rows if row["compute"] == compute]
            axes = panels[0][column]
            _draw_speeds(axes, chosen, contestants, colors)
            axes.set_title(_title(chosen), loc="left", fontsize=11, fontweight="bold")
            if compared:
                _draw_ratios(panels[1][column], chosen, compared, colors)
            panels[-1][column].set_xlabel("sequences per step")
        panels[0][0].set_ylabel("tokens per second")
        if compared:
            panels[1][0].set_ylabel(f"{OURS} is faster by")
            _scale_ratios(panels[1][0], [row for row in rows if row["contestant"] in compared])
        _add_legend(figure, panels[0][0], _heading(rows))
        foot = textwrap.fill(_foot(rows), width=round(12.5 * figure.get_figwidth()))
        figure.supxlabel(foot, x=0.012, ha="left", fontsize=9, color=_MUTED)
        figure.savefig(png)


def _add_legend(figure, axes, title) -> None:
    """Names the contestants above the panels, in as many columns as their names leave room for."""
    handles, labels = axes.get_legend_handles_labels()
    width = 0.6 + 0.1 * max(map(len, labels))  # inches, at this size of letters
    columns = max(1, min(len(labels), int(figure.get_figwidth() / width)))
    figure.legend(
        handles,
        labels,
        title=title,
        loc="outside upper left",
        alignment="left",
        ncols=columns,
        frameon=False,
    )


def _draw_speeds(axes, rows, contestants, colors) -> None:
    places = _places(rows)
    width = 0.8 / len(contestants)
    for i, name in enumerate(contestants):
        own = [row for row in rows if row["contestant"] == name]
        x = [places[row["batch_size"]] + (i + 0.5) * width - 0.4 for row in own]
        speed = [row["tokens_per_second"] for row in own]
        factor = [row["tokens_per_second"] * row["step_seconds"] for row in own]
        slowest = [n / row["most_step_seconds"] for n, row in zip(factor, own, strict=True)]
        fastest = [n / row["least_step_seconds"] for n, row in zip(factor, own, strict=True)]
        whiskers = [
            [s - low for s, low in zip(speed, slowest, strict=True)],
            [high - s for s, high in zip(speed, fastest, strict=True)],
        ]
        style = dict(ecolor=_TEXT, capsize=2, error_kw=dict(elinewidth=1))
        axes.bar(x, speed, 0.92 * width, yerr=whiskers, color=colors[name], label=name, **style)
    axes.yaxis.set_major_formatter(lambda value, _: format_count(value))
    axes.set_xticks(list(places.values()), [f"{size}" for size in places])
    axes.set_xlim(-0.6, len(places) - 0.4)
    _calm(axes)


def _draw_ratios(axes, rows, compared, colors) -> None:
    places = _places(rows)
    axes.axhline(1, color=_TEXT, linewidth=1)
    for i, name in enumerate(compared):
        own = [row for row in rows if row["contestant"] == name]
        shift = 0.24 * (i - (len(compared) - 1) / 2)
        x = [places[row["batch_size"]] + shift for row in own]
        axes.plot(x, [row["speedup"] for row in own], "o", color=colors[name], markersize=6)
        for place, row in zip(x, own, strict=True):
            if row["speedup_low"] is not None:
                interval = row["speedup_low"], row["speedup_high"]
                axes.plot([place, place], interval, color=colors[name], linewidth=2)
            axes.annotate(
                f"{row['speedup']:.2f}",
                (place, _shown_interval(row)[1]),
                xytext=(0, 5),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                color=_TEXT,
            )
    axes.set_xticks(list(places.values()), [f"{size}" for size in places])
    axes.set_xlim(-0.6, len(places) - 0.4)
    _calm(axes)


def _scale_ratios(axes, rows) -> None:
    """Shows the ratios of all panels by their logarithms: half lies as far from 1 as twice."""
    from matplotlib.ticker import FixedLocator, NullLocator

    ends = [end for row in rows for end in _shown_interval(row)]
    low, high = min(0.8, *ends) / 1.05, max(1.25, *ends) * 1.12  # with room for a number
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    lines = next(each for span, each in _RATIOS.items() if high <= span * low)
    axes.yaxis.set_major_locator(FixedLocator(lines))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _shown_interval(row: dict[str, Any]) -> tuple[float, float]:
    """Returns where a ratio's interval ends. Beyond three times the ratio it leaves the picture."""
    ratio, low, high = row["speedup"], row["speedup_low"], row["speedup_high"]
    return (ratio, ratio) if low is None else (max(low, ratio / 3), min(high, 3 * ratio))


def _places(rows: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Returns where each batch size stands on the x axis."""
    return {size: i for i, size in enumerate(dict.fromkeys(row["batch_size"] for row in rows))}


def _calm(axes) -> None:
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(color=_MUTED, labelcolor=_MUTED)
    axes.spines[:].set_visible(False)


def _title(rows: Sequence[dict[str, Any]]) -> str:
    """Names the compute type, and the machine's rate of products in it."""
    rates = [row["product_flops"] for row in rows if row["product_flops"]]
    if not rates:
        return rows[0]["compute"]
    low, high = (format_count(round(rate / 1e9)) for rate in (min(rates), max(rates)))
    span = low if math.isclose(min(rates), max(rates), rel_tol=0.01) else f"{low} to {high}"
    return f"{rows[0]['compute']} (products: {span} GFLOP/s)"


def _heading(rows: Sequence[dict[str, Any]]) -> str:
    row = rows[0]
    return f"{row['subject']} {row['model']}, {row['context_length']} tokens in a sequence"


def _foot(rows: Sequence[dict[str, Any]]) -> str:
    row = rows[0]
    versions = dict.fromkeys(row["versions"] for row in rows)
    is_compared = any(other["contestant"] != OURS for other in rows) and row["rounds"] > 1
    layers = "scanned" if row["scan_layers"] else "unrolled"
    data = "inside" if row["with_data"] else "outside"
    return (
        f"{row['device']}, {row['cpu_cores']} CPU cores; {', '.join(versions)}; attention "
        f"{row['attention']}, precision of products {row['matmul_precision']}, "
        f"{row['optimizer']}, remat {row['remat']}, layers {layers} in jax, "
        f"data {data} of the time; {counted(row['rounds'], 'turn')} each: median, least and most"
        + ("; ratios with 95 % intervals over turns" if is_compared else "")
    )
