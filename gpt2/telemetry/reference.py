"""Published losses to hold a run against: those of configs/reference/, or a file of one's own."""

import csv
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from gpt2.errors import UserError

Point = tuple[float, float]  # tokens, loss
PLACE = Path(__file__).parents[2] / "configs" / "reference"


def read_reference(name: str) -> dict[str, np.ndarray]:
    """Returns points `[N, 2]`, tokens (ascending) and loss, by the name of their curve.

    `name` is that of a file in configs/reference/, or a path. A loss whose tokens are unknown (nan)
    is a level, such as that of OpenAI's weights. No name gives no curves.
    """
    if not name:
        return {}
    published = PLACE / f"{name}.csv"
    path = published if published.is_file() else Path(name)
    try:
        curves = _read_table(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        names = sorted(file.stem for file in PLACE.glob("*.csv"))
        what = f"{name} holds no published losses ({error})"
        how = (
            f"Use {names}, or a table of numbers that begins with the line tokens,loss"
        )
        raise UserError(what, how) from None
    return {name: np.array(sorted(curves[name])) for name in curves}


def _read_table(path: Path) -> Mapping[str, list[Point]]:
    curves = defaultdict[str, list[Point]](list)
    with open(path, newline="", encoding="utf-8") as file:
        rows = (line for line in file if not line.startswith("#"))
        for row in csv.DictReader(rows):
            name = row.get("name") or path.stem
            tokens = float(row["tokens"] or "nan")
            curves[name].append((tokens, float(row["loss"])))
    for points in curves.values():
        if len(points) > 1 and np.isnan(points).any():
            raise ValueError("a number is missing")
    if not curves:
        raise ValueError("it has no rows")
    return curves
