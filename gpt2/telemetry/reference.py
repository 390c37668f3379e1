"""Published losses to compare a run with, from configs/reference/ or from a user's file."""

from pathlib import Path

import numpy as np

from gpt2.utils.files import reading

REFERENCES = Path(__file__).parents[2] / "configs" / "reference"


def read_reference(name: str) -> dict[str, np.ndarray]:
    """Return curves by name: points `[N, 2]` of tokens, ascending, and loss in nats per token.

    `name` is the name of a file in configs/reference/, or a path; an empty name returns no curves.
    A loss whose tokens are unknown (nan) is a level, such as that of OpenAI's weights.
    """
    if not name:
        return {}
    import pandas as pd

    published = REFERENCES / f"{name}.csv"
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
