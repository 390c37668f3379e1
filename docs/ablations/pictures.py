"""Draw optimizers.png, widths.png and ../ledger.png from the tables next to them.

python docs/ablations/pictures.py
"""

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
PANELS = {
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


losses = rates_and_losses("optimizers.csv")
with drawing(FOLDER / "optimizers.png", height=5) as (axes,):
    for (label, arm), color in zip(OPTIMIZERS.items(), COLORS, strict=False):
        draw_line(axes, losses[arm], label, color)
    label_rates(axes, losses["baseline"].index)
    axes.set_ylabel("final validation loss (nats per token)")

losses = rates_and_losses("widths.csv")
with drawing(FOLDER / "widths.png", height=4.5, width=14, columns=4) as panels:
    for axes, (title, options) in zip(panels, PANELS.items(), strict=True):
        for (width, size), color in zip(WIDTHS.items(), COLORS, strict=False):
            arm = ",".join(size + options) or "baseline"
            draw_line(axes, losses[arm], f"width {width}", color)
        axes.set_title(title)
        label_rates(axes, losses["baseline"].index)
    panels[0].set_ylabel("final validation loss (nats per token)")

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
