"""A plot of validation curves, and the context manager with which the lab draws all its plots."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpt2.errors import UserError
from gpt2.lab.experiments.results import AMOUNTS, Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colors that colour-blind people can distinguish (Okabe and Ito 2008).
BLUE = "#0072b2"
RED = "#d55e00"
GREEN = "#009e73"
ORANGE = "#e69f00"
GREY = "#6b7280"
BASELINE = "#4b5563"
COLORS = (BLUE, RED, GREEN, "#cc79a7", ORANGE, "#56b4e9", "#8c6d31")
_LINES = ("-", "--", ":", "-.")  # the next style is used once all colors are used up
MARKED = 12  # curves of at most this number of validations have dots


def plot_curves(
    png: Path,
    curves: Mapping[str, Sequence[Curve]],
    unit: str,
) -> None:
    """Plot the mean and the range of each arm's curves against tokens, FLOPs and seconds.

    `curves` maps each arm's name to its curves, one for each seed that has been validated. The
    first arm is the baseline. A curve of at most `MARKED` validations has a dot at each of them. A
    curve whose tokens are unknown (NaN) is a horizontal line at its first score. `unit` is the unit
    of the scores.
    """
    from matplotlib.ticker import EngFormatter

    height = 4.6 + 0.12 * len(curves)
    styles = [("-", BASELINE), *itertools.product(_LINES, COLORS)]
    with drawing(png, height, width=14, columns=3) as panels:
        for axes, (amount, title) in zip(panels, AMOUNTS.items(), strict=True):
            for name, style in zip(curves, itertools.cycle(styles), strict=False):
                line, color = style
                members = curves[name]
                if not members:
                    continue
                if any(np.isnan(curve.tokens).any() for curve in members):
                    level = members[0].scores[0]
                    axes.axhline(
                        level, label=visible(name), color=color, linestyle=line
                    )
                    continue
                # Runs of an arm are validated at the same steps. A shorter curve belongs to a run
                # that has not finished. The mean ends with the shortest curve.
                number = min(len(curve.scores) for curve in members)
                x = np.mean([getattr(c, amount)[:number] for c in members], axis=0)
                y = np.array([curve.scores[:number] for curve in members])
                axes.plot(
                    x,
                    y.mean(0),
                    marker="o" if number <= MARKED else "",
                    markersize=4,
                    label=visible(name),
                    color=color,
                    linestyle=line,
                )
                axes.fill_between(x, y.min(0), y.max(0), color=color, alpha=0.18)
            axes.set_xlabel(title)
            axes.set_xlim(left=0)
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # such as 50k or 2T
        # The high losses of the first steps would leave little space for the other losses.
        shown = list[float]()
        for curve in itertools.chain(*curves.values()):
            skipped = len(curve.scores) // 10
            shown.extend(curve.scores[skipped:])
        margin = 0.05 * (max(shown) - min(shown)) + 0.01 * max(shown)
        panels[0].set_ylim(min(shown) - margin, max(shown) + margin)
        several = any(len(members) > 1 for members in curves.values())
        bands = "; bands: range over seeds" if several else ""
        panels[0].set_ylabel(f"validation loss ({unit}){bands}")


@contextlib.contextmanager
def drawing(
    png: Path, height: float, width: float = 9, columns: int = 1
) -> Iterator[list["Axes"]]:
    """Yield the panels of a new figure. At the end, add a legend and write the figure to `png`.

    `height` and `width` are in inches. `columns` is the number of panels, which are next to each
    other.
    """
    # `Figure` is used without pyplot, which has global state and connects to a window system.
    import matplotlib
    from matplotlib.figure import Figure

    # Otherwise matplotlib takes a name with two dollar signs for a formula.
    with matplotlib.rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
        (panels,) = figure.subplots(1, columns, sharey=True, squeeze=False)
        for axes in panels:
            axes.grid(alpha=0.3)
            axes.ticklabel_format(useOffset=False)  # ticks are values, not differences
        yield panels
        handles, labels = panels[0].get_legend_handles_labels()
        if labels:  # the legend is below the panels, where it does not hide curves
            figure.legend(
                handles, labels, fontsize=9, loc="outside lower left", ncols=1 + columns
            )
        try:  # without a format, a path without a suffix would get the suffix .png
            figure.savefig(png, format=png.suffix[1:] or "png")
        except ValueError as error:  # the suffix is not the name of a format
            remedy = "Give a path that ends in .png"
            raise UserError(f"{png} cannot be written ({error})", remedy) from error


def visible(name: str) -> str:
    """Return a label that matplotlib shows, even if the name begins with `_`."""
    return f"\u200b{name}" if name.startswith("_") else name
