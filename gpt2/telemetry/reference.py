"""Published losses with which a run is compared, from configs/reference/ or a user's file."""

from pathlib import Path

import numpy as np

from gpt2.utils.files import reading

REFERENCES = Path(__file__).parents[2] / "configs" / "reference"


def read_reference(name: str) -> dict[str, np.ndarray]:
    """Return loss curves, by the name of each curve. A curve is an array `[N, 2]`.

    A row contains a number of tokens and the loss in nats per token. Rows are sorted by tokens. If
    the number of training tokens is not known, as for OpenAI's weights, it is NaN. `name` is the
    name of a CSV file in configs/reference/, without its suffix, or a path. If `name` is empty,
    there are no curves.
    """
    if not name:
        return {}
    import pandas as pd

    published = REFERENCES / f"{name}.csv"
    path = published if published.is_file() else Path(name)
    with reading(
        f"The reference {name}",
        "Give the name of a file in configs/reference/ without .csv, such as nanogpt-124m, or a "
        "CSV file with the columns tokens,loss",
    ):
        table = pd.read_csv(path, comment="#")
        if "name" not in table:
            table["name"] = path.stem
        table = table.astype({"tokens": float, "loss": float}).sort_values("tokens")
        table = table[np.isfinite(table["loss"])]
    curves = dict[str, np.ndarray]()
    for curve, points in table.groupby("name", sort=False):
        curves[str(curve)] = points[["tokens", "loss"]].to_numpy()
    return curves
