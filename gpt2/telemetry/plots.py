"""The curves of a run, readable at a glance: loss.png."""

from pathlib import Path
from typing import Any

import numpy as np

from gpt2.telemetry.metrics import read_metrics
from gpt2.telemetry.reference import read_reference


def plot_losses(workdir: Path, shares: dict[str, float], reference: str = "") -> None:
    """Draws loss.png: validation, training (faint) and its mean, and `shares` of time by name.

    The published losses of `reference` lie at the steps by which the run has read as many tokens.
    """
    import pandas as pd
    from matplotlib.figure import (
        Figure,  # without pyplot: no window system, no global state
    )

    records = read_metrics(workdir / "metrics.jsonl")
    losses = pd.DataFrame(records, columns=["step", "train/loss", "eval/loss"])
    losses = losses.set_index("step").astype(float)
    train = losses["train/loss"].dropna()
    validation = losses["eval/loss"].dropna()
    if train.empty:
        return
    # Without the first values, before the model knows which tokens are frequent.
    late = pd.concat([train.iloc[len(train) // 20 :], validation])
    low = late.min()
    high = late.max()
    figure = Figure(figsize=(9, 5.6), dpi=150, layout="constrained")
    axes, time = figure.subplots(2, height_ratios=[16, 1])
    axes.set(title=str(workdir), xlabel="step", ylabel="loss (nats per token)")
    smooth = train.rolling(max(1, len(train) // 30), min_periods=1, center=True).mean()
    axes.plot(train, color="C0", alpha=0.22, linewidth=1)
    axes.plot(smooth, color="C0", label=f"train {smooth.iloc[-1]:.3f} (smoothed)")
    if not validation.empty:
        label = f"validation {validation.iloc[-1]:.3f} (best {validation.min():.3f})"
        axes.plot(validation, color="C3", marker="o", markersize=4, label=label)
    axes.set_xlim(axes.get_xlim())  # of the run, whatever is published
    newest = [record for record in records if "tokens" in record][-1]
    per_step = newest["tokens"] / newest["step"]
    last = newest["step"]
    for index, (name, points) in enumerate(read_reference(reference).items()):
        look: dict[str, Any] = dict(
            color=("0.25", "0.5", "0.65", "0.8")[index % 4], linestyle="--"
        )
        steps = points[:, 0] / per_step
        if np.isnan(steps).all():
            axes.axhline(points[0, 1], label=f"{name} {points[0, 1]:.3f}", **look)
        else:
            axes.plot(steps, points[:, 1], marker=".", label=name, **look)
        beyond = (steps < 0.05 * last) | (steps > last)
        shown = [low, high, *points[~beyond, 1]]
        low = min(shown)
        high = max(shown)
    span = high - low
    axes.set_ylim(low - 0.08 * span - 0.01, high + span / 2 + 0.01)
    axes.legend(frameon=False, loc="upper right")
    axes.grid(alpha=0.3)
    left = 0.0
    for name, share in shares.items():
        text = f"{name} {share:.0%}" if share > 0.005 * len(name) + 0.02 else ""
        time.bar_label(
            time.barh(0, share, left=left), [text], label_type="center", fontsize=7
        )
        left += share
    time.set(xlim=(0, 1), title="time since the first start")
    time.set_axis_off()
    figure.savefig(workdir / "loss.png")
