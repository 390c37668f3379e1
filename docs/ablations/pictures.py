"""Draw optimizers.png, widths.png, depths.png and ../ledger.png from the tables next to them.

python docs/ablations/pictures.py
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd

from gpt2.lab.experiments.curve_plot import COLORS, drawing
from gpt2.lab.ledger.ledger_plot import plot_ledger

FOLDER = Path(__file__).parent
OPTIMIZERS = {
    "AdamW": "baseline",
    "Lion": "optim.name=lion",
    "AdEMAMix": "optim.name=ademamix+optim.beta3=0.99",
    "Muon": "optim.name=muon",
    "NorMuon": "optim.name=normuon",
}
MUP = "model.mup_base_width=64"
OPTIMIZERS_AND_MUP = {
    "AdamW": [],
    "AdamW, muP": [MUP],
    "Muon": ["optim.name=muon"],
    "Muon, muP": ["optim.name=muon", MUP],
}
WIDTHS = {
    "64": [],
    "128": ["model.embed_dim=128+model.num_heads=2"],
    "256": ["model.embed_dim=256+model.num_heads=4"],
}
TRANSFER = {"without CompleteP": [], "CompleteP": ["model.mup_base_depth=2"]}
DEPTHS = {
    "2": ["model.num_layers=2"],
    "4": [],
    "8": ["model.num_layers=8"],
    "16": ["model.num_layers=16"],
}


def rates_and_losses(name: str) -> pd.Series:
    """Return the mean final validation loss of each arm at each learning rate."""
    runs = pd.read_csv(FOLDER / name)
    runs = runs[runs.purpose == "choose"]
    rates = runs["values"].str.removeprefix("optim.learning_rate=").astype(float)
    return runs.groupby([runs.arm, rates])["eval/loss"].mean()


def draw_line(axes, losses: pd.Series, label: str, color: str) -> None:
    """Draw the losses over the rates, with a ring around the best."""
    axes.plot(losses.index, losses, "o-", label=label, color=color)
    best = losses.idxmin()
    axes.plot(best, losses[best], "o", ms=13, fillstyle="none", color=color)


def label_rates(axes, rates: pd.Index) -> None:
    """Label a logarithmic axis with the rates that were tried."""
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.set_xlabel("learning rate (ring: the best)")


def draw_sizes(
    name: str,
    dimension: str,
    sizes: Mapping[str, Sequence[str]],
    panels: Mapping[str, Sequence[str]],
) -> None:
    """Draw `name`.png from `name`.csv: a panel for each of `panels`, with a line for each size.

    The values of `panels` and `sizes` are the options that the arm's name lists.
    """
    losses = rates_and_losses(f"{name}.csv")
    width = 2 + 3 * len(panels)
    png = FOLDER / f"{name}.png"
    with drawing(png, height=4.5, width=width, columns=len(panels)) as columns:
        for axes, (title, options) in zip(columns, panels.items(), strict=True):
            for (size, of_size), color in zip(sizes.items(), COLORS, strict=False):
                arm = ",".join([*of_size, *options]) or "baseline"
                draw_line(axes, losses[arm], f"{dimension} {size}", color)
            axes.set_title(title)
            label_rates(axes, losses["baseline"].index)
        columns[0].set_ylabel("final validation loss (nats per token)")


losses = rates_and_losses("optimizers.csv")
with drawing(FOLDER / "optimizers.png", height=5) as (axes,):
    for (label, arm), color in zip(OPTIMIZERS.items(), COLORS, strict=False):
        draw_line(axes, losses[arm], label, color)
    label_rates(axes, losses["baseline"].index)
    axes.set_ylabel("final validation loss (nats per token)")

draw_sizes("widths", "width", WIDTHS, OPTIMIZERS_AND_MUP)
draw_sizes("depths", "depth", DEPTHS, TRANSFER)

ideas = []
gains = {0: 0.0}
for row in pd.read_csv(FOLDER.parent / "ledger" / "track.csv").itertuples():
    best = max(gains)
    interval = np.array([row.difference, row.low, row.high])
    idea = SimpleNamespace(
        number=row.number,
        text=row.idea,
        best=best,
        answer=row.answer,
        interval=interval,
        pairs=row.pairs,
    )
    ideas.append(idea)
    if row.answer == "keep":
        gains[row.number] = gains[best] + row.difference
plot_ledger(FOLDER.parent / "ledger.png", ideas, gains)
