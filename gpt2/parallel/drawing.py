"""Draws which device holds which part of a run's arrays, on the terminal and as a picture.

Parameters, the optimizer's state and the batch are drawn from shapes and shardings alone, so a plan
can draw devices that are not here. Arrays that are spread alike share one drawing.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from gpt2.errors import UserError, require_writable
from gpt2.utils.text import counted, format_bytes

_BATCH_AXES = ("batch", "length")
_MOST_ROWS = 16  # of parts on the terminal and in the picture; the middle is left out
_MOST_COLUMNS = 8
_MOST_NAMES = 4
_LEGEND = "Each box is a part. The numbers in it are the devices that hold it."


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis of an array.

    Attributes:
        name: as the model calls it, such as `embed`.
        size: its length.
        split: the mesh axes that split it, and how many devices each has; those of one device are
            left out.
    """

    name: str
    size: int
    split: dict[str, int]

    @property
    def parts(self) -> int:
        """The number of parts."""
        return math.prod(self.split.values())

    def __str__(self) -> str:
        how = " x ".join(f"{axis} {size}" for axis, size in self.split.items())
        return f"{self.name} {self.size:,}, " + (f"split over {how}" if how else "whole")


@dataclasses.dataclass(frozen=True)
class Drawing:
    """How some arrays are spread that are spread alike.

    Attributes:
        names: of the arrays, those of layers as one: `params/h_*/mlp/c_fc/kernel (12 layers)`.
        dtype: of their elements.
        axes: of each array.
        down: the axis whose parts are drawn below one another, or None.
        across: the axis whose parts are drawn side by side, or None.
        cells: for each row and column of parts, the devices that hold it, as text.
        part: shape of a part.
        part_bytes: its size.
    """

    names: list[str]
    dtype: str
    axes: list[Axis]
    down: int | None
    across: int | None
    cells: list[list[str]]
    part: tuple[int, ...]
    part_bytes: int

    def describe(self) -> list[str]:
        """Returns lines of text: what is drawn, and what its two directions are."""
        shape = " x ".join(f"{axis.name} {axis.size}" for axis in self.axes)
        number = counted(math.prod(axis.parts for axis in self.axes), "part")
        part = " x ".join(map(str, self.part))
        lines = [
            f"{self.dtype} [{shape}]",
            f"{number} of [{part}], {format_bytes(self.part_bytes)}",
        ]
        for words, i in (("down", self.down), ("across", self.across)):
            lines += [f"{words}: {self.axes[i]}"] if i is not None else []
        return lines


def check_picture(name: str | None) -> Path | None:
    """Returns the file that --visualize_to names, None for none.

    Raises:
        UserError: it cannot be written.
    """
    if name is None:
        return None
    picture = Path(name)
    require_writable("visualize_to", picture.parent)
    return picture


def visualize(
    state: Any, batch: Any, logical_axes: Any, pattern: str, picture: Path | None = None
) -> None:
    """Draws, on standard output, which device holds which part of the arrays that match.

    Args:
        state: a state of arrays, or of shapes with shardings.
        batch: arrays or shapes by name.
        logical_axes: names of every parameter's axes, as `GPT.logical_axes` gives them.
        pattern: regular expression for names such as `params/h_0/mlp/c_fc/kernel`,
            `opt_state/mu/h_0/mlp/c_fc/kernel` and `batch/tokens`.
        picture: a file for the same as a picture, in the format that its name ends with.

    Raises:
        UserError: nothing matches, or the pattern is not a regular expression.
    """
    drawings = find_drawings(state, batch, logical_axes, pattern)
    _print(drawings)
    if picture is not None:
        picture.parent.mkdir(parents=True, exist_ok=True)
        plot(drawings, picture)
        print(f"drawn in {picture}\n", flush=True)


def find_drawings(state: Any, batch: Any, logical_axes: Any, pattern: str) -> list[Drawing]:
    """Returns what `visualize` draws: the largest arrays first, those spread alike together."""
    named = _named(state, batch, logical_axes)
    largest = max(named, key=lambda name: named[name][0].size)
    example = f"For example, use --visualize={largest}"
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(
            f"--visualize={pattern} is not a regular expression ({error})", example
        ) from None
    alike: dict[Any, list[str]] = {}
    for name, (leaf, names) in named.items():
        if re.search(pattern, name):
            key = leaf.shape, str(leaf.dtype), leaf.sharding.spec, names
            alike.setdefault(key, []).append(name)
    if not alike:
        raise UserError(f"--visualize={pattern} matches no parameter, moment or batch", example)
    drawings = [_draw(*named[names[0]], _summarize(names)) for names in alike.values()]
    return sorted(drawings, key=lambda drawing: -math.prod(axis.size for axis in drawing.axes))


def _named(state: Any, batch: Any, logical_axes: Any) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Returns all arrays but scalars by name, each with the names of its axes."""
    parameters = {
        _name(path): tuple(names)
        for path, names in jax.tree_util.tree_leaves_with_path(
            logical_axes, is_leaf=lambda node: isinstance(node, PartitionSpec)
        )
    }
    named: dict[str, tuple[Any, tuple[str, ...]]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = _name(path)
        # An optimizer's chain numbers its parts. The numbers are left out where names stay apart.
        short = re.sub(r"(?<=/)\d+/", "", name)
        short = name if short in named else short
        followed = (p for p in parameters if short.endswith(f"/{p}"))
        names = parameters.get(next(followed, ""), ())
        if leaf.ndim:
            named[short] = leaf, _axis_names(leaf, names)
    for name, leaf in batch.items():
        named[f"batch/{name}"] = leaf, _axis_names(leaf, ("device", *_BATCH_AXES)[-leaf.ndim :])
    return named


def _axis_names(leaf: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    return names if len(names) == leaf.ndim else tuple(f"axis_{i}" for i in range(leaf.ndim))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _summarize(names: Sequence[str]) -> list[str]:
    """Returns names of arrays, those of layers as one."""
    layers: dict[str, int] = {}
    for name in names:
        kind = re.sub(r"/h_\d+/", "/h_*/", name)
        layers[kind] = layers.get(kind, 0) + 1
    if len(names) == len(layers):  # of one layer each
        return list(names)
    return [f"{kind} ({number} layers)" if number > 1 else kind for kind, number in layers.items()]


def _draw(leaf: Any, names: tuple[str, ...], arrays: list[str]) -> Drawing:
    sharding, mesh = leaf.sharding, leaf.sharding.mesh
    spec = (*sharding.spec, *[None] * leaf.ndim)[: leaf.ndim]
    axes = [
        Axis(name, size, {a: mesh.shape[a] for a in _tuple(split) if mesh.shape[a] > 1})
        for name, size, split in zip(names, leaf.shape, spec, strict=True)
    ]
    # The axes that are split, else the longest, in their order.
    ranked = sorted(range(leaf.ndim), key=lambda i: (axes[i].parts == 1, -axes[i].size))
    down, across = (*sorted(ranked[:2]), None)[:2] if leaf.ndim > 1 else (None, 0)
    part = sharding.shard_shape(leaf.shape)
    shape = [1 if i is None else axes[i].parts for i in (down, across)]
    holders: list[list[list[int]]] = [[[] for _ in range(shape[1])] for _ in range(shape[0])]
    for device, index in sharding.devices_indices_map(leaf.shape).items():
        row, column = (0 if i is None else (index[i].start or 0) // part[i] for i in (down, across))
        holders[row][column].append(device.id)
    cells = [[_describe_devices(sorted(devices)) for devices in row] for row in holders]
    size = math.prod(part) * leaf.dtype.itemsize
    return Drawing(arrays, str(leaf.dtype), axes, down, across, cells, part, size)


def _tuple(axes: Any) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def _describe_devices(ids: list[int]) -> str:
    """Writes numbers of devices: `0,4`, `0-7`, `0,8..56`, `0-3,8-11`."""
    steps = set(np.diff(ids).tolist())
    if len(ids) < 3 or (len(ids) == 4 and steps != {1}):
        return ",".join(map(str, ids))
    if len(steps) == 1 and steps != {1}:
        return f"{ids[0]},{ids[1]}..{ids[-1]}"
    runs = np.split(ids, np.flatnonzero(np.diff(ids) > 1) + 1)
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _shorten(drawing: Drawing) -> list[list[str]]:
    """Returns the cells of a drawing, without the middle of what has too many."""

    def ends(items: list, most: int) -> list:
        if len(items) <= most:
            return items
        return [*items[: most // 2], None, *items[len(items) - (most - most // 2 - 1) :]]

    rows = ends(drawing.cells, _MOST_ROWS)
    width = min(_MOST_COLUMNS, len(drawing.cells[0])) or 1
    dots = ["..."] * (width if len(drawing.cells[0]) > _MOST_COLUMNS else len(drawing.cells[0]))
    return [
        dots if row is None else ["..." if x is None else x for x in ends(row, _MOST_COLUMNS)]
        for row in rows
    ]


def _shown_names(drawing: Drawing) -> list[str]:
    more = len(drawing.names) - _MOST_NAMES
    return drawing.names[:_MOST_NAMES] + ([f"and {more} more"] if more > 0 else [])


def _print(drawings: Sequence[Drawing]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    console.print(f"{_LEGEND}\n")
    for drawing in drawings:
        for name in _shown_names(drawing):
            console.print(Text(name, style="bold cyan"), soft_wrap=True)
        for line in drawing.describe():
            console.print(Text(f"  {line}"), soft_wrap=True)
        table = Table(show_header=False, show_lines=True, box=box.SQUARE, pad_edge=True)
        cells = _shorten(drawing)
        for _ in cells[0]:
            table.add_column(justify="center", overflow="fold")
        for row in cells:
            table.add_row(*row)
        console.print(table)
        console.print()


def plot(drawings: Sequence[Drawing], picture: Path) -> None:
    """Writes the drawings into a picture, one panel each, with the longest side of parts to scale.

    Args:
        drawings: from `find_drawings`.
        picture: a file whose name ends in .png, .pdf or .svg.
    """
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    columns = min(2, len(drawings))
    rows = math.ceil(len(drawings) / columns)
    with matplotlib.rc_context({"font.size": 9, "font.family": "sans-serif"}):
        figure = Figure(figsize=(6.4 * columns, 4.2 * rows), dpi=130, layout="constrained")
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for panel in panels:
            panel.set_axis_off()
        for panel, drawing in zip(panels, drawings, strict=False):
            panel.set_axis_on()
            _plot_panel(panel, drawing)
        figure.suptitle(_LEGEND, x=0.01, ha="left")
        figure.savefig(picture)


def _plot_panel(panel: Any, drawing: Drawing) -> None:
    from matplotlib.patches import Rectangle

    cells = _shorten(drawing)
    height, width = len(cells), len(cells[0])
    color_of = _colors(drawing)
    for y, row in enumerate(cells):
        for x, text in enumerate(row):
            color = color_of.get(text, "white")
            panel.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor="#374151"))
            panel.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=9)
    panel.set(xlim=(0, width), ylim=(height, 0))
    for direction, i, count in (("x", drawing.across, width), ("y", drawing.down, height)):
        if i is None:
            panel.set(**{f"{direction}ticks": []})
            continue
        axis = drawing.axes[i]
        ticks, labels = [0, count], [0, axis.size]
        if count == axis.parts:  # where each part begins
            ticks = list(range(count + 1))
            labels = [axis.size * n // count for n in ticks]
        panel.set(
            **{f"{direction}ticks": ticks, f"{direction}ticklabels": labels},
            **{f"{direction}label": str(axis)},
        )
    title = "\n".join([*_shown_names(drawing), *drawing.describe()[:2]])
    panel.set_title(title, loc="left", fontsize=8)


def _colors(drawing: Drawing) -> dict[str, Any]:
    """Returns a colour for each group of devices, in the order of their numbers."""
    import matplotlib

    holders = sorted({text for row in drawing.cells for text in row}, key=_numbers)
    if len(holders) <= 8:
        return {text: matplotlib.colormaps["Pastel1"](i) for i, text in enumerate(holders)}
    shades = matplotlib.colormaps["rainbow"](np.linspace(0, 1, len(holders)))
    return {text: (*shade[:3], 0.4) for text, shade in zip(holders, shades, strict=True)}


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
