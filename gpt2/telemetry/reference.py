"""Published losses to hold a run against: those of configs/reference/, or a file of one's own."""

import csv
from pathlib import Path

import numpy as np

from gpt2.errors import UserError

PLACE = Path(__file__).parents[2] / "configs" / "reference"


def read_reference(name: str) -> dict[str, np.ndarray]:
    """Returns points `[N, 2]`, tokens (ascending) and loss, by the name of their curve.

    `name` is that of a file in configs/reference/, or a path. A loss whose tokens are unknown (nan)
    is a level, such as that of OpenAI's weights. No name gives no curves.
    """
    if not name:
        return {}
    path = next(
        (p for p in (Path(name), PLACE / f"{name}.csv") if p.is_file()), Path(name)
    )
    curves: dict[str, list[tuple[float, float]]] = {}
    try:
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(
                line for line in file if not line.startswith("#")
            ):
                point = float(row["tokens"] or "nan"), float(row["loss"])
                curves.setdefault(row.get("name") or path.stem, []).append(point)
        if not curves or any(len(c) > 1 and np.isnan(c).any() for c in curves.values()):
            raise ValueError("a number is missing")
    except (OSError, ValueError, KeyError, TypeError) as error:
        names = ", ".join(sorted(file.stem for file in PLACE.glob("*.csv")))
        how = (
            f"Use {names}, or a table of numbers that begins with the line tokens,loss"
        )
        raise UserError(f"{name} holds no published losses ({error})", how) from None
    return {name: np.array(sorted(points)) for name, points in curves.items()}
