"""Published losses to hold a run against: those of configs/reference/, or a file of one's own."""

from pathlib import Path

import numpy as np

from gpt2.utils.files import reading

PLACE = Path(__file__).parents[2] / "configs" / "reference"


def read_reference(name: str) -> dict[str, np.ndarray]:
    """Returns points `[N, 2]`, tokens (ascending) and loss, by the name of their curve.

    `name` is that of a file in configs/reference/, or a path. A loss whose tokens are unknown (nan)
    is a level, such as that of OpenAI's weights. No name gives no curves.
    """
    if not name:
        return {}
    import pandas as pd

    published = PLACE / f"{name}.csv"
    path = published if published.is_file() else Path(name)
    with reading(name, "Name one of configs/reference/, or a table of tokens,loss"):
        table = pd.read_csv(path, comment="#")
        if "name" not in table:
            table["name"] = path.stem
        table = table.astype({"tokens": float, "loss": float}).sort_values("tokens")
        table = table[np.isfinite(table["loss"])]
    curves = dict[str, np.ndarray]()
    for curve, points in table.groupby("name", sort=False):
        curves[str(curve)] = points[["tokens", "loss"]].to_numpy()
    return curves
