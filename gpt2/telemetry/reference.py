"""Published losses with which a run is compared, from configs/reference/ or a user's file."""

from pathlib import Path

import numpy as np

from gpt2.utils.files import reading

REFERENCES = Path(__file__).parents[2] / "configs" / "reference"


def read_reference(name: str) -> dict[str, np.ndarray]:
    """Return a dict from the name of each published loss curve to an array `[N, 2]`.

    `name` is the name of a CSV file in configs/reference/ without its suffix, or the path of a CSV
    file. If it is empty, the dict is empty. Each row of an array contains a number of training
    tokens, and the loss in nats per token after this number. Rows are sorted by tokens. The number
    is NaN if it is not known, as for OpenAI's weights.
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
