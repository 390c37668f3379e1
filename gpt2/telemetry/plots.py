"""The curves of a run, readable at a glance: loss.png."""

from pathlib import Path

import numpy as np

from gpt2.telemetry.metrics import read_metrics
from gpt2.telemetry.reference import read_reference
from gpt2.utils.stores import place_of

_GREYS = ("0.25", "0.5", "0.65", "0.8")


def plot_losses(workdir: Path, reference: str = "") -> None:
    """Draws loss.png: validation, training (faint) and its mean.

    The published losses of `reference` lie at the steps by which the run has read as many tokens.
    """
    import pandas as pd
    from matplotlib.figure import Figure  # without pyplot: no windows, no global state

    records = read_metrics(workdir / "metrics.jsonl")
    columns = ["step", "tokens", "train/loss", "eval/loss"]
    losses = pd.DataFrame(records, columns=columns)
    losses = losses.set_index("step").astype(float)
    train = losses["train/loss"].dropna()
    validation = losses["eval/loss"].dropna()
    if train.empty:
        return
    figure = Figure(figsize=(9, 5.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.set_title(place_of(workdir))
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    window = max(1, len(train) // 30)
    rolling = train.rolling(window, min_periods=1, center=True)
    smooth = rolling.mean()
    axes.plot(train, color="C0", alpha=0.22)
    label = f"train {smooth.iloc[-1]:.3f}"
    if window > 1:
        label += " (smoothed)"
    axes.plot(smooth, color="C0", label=label)
    if not validation.empty:
        best = validation.min()
        newest = validation.iloc[-1]
        label = f"validation {newest:.3f} (best {best:.3f})"
        axes.plot(validation, color="C3", marker=".", label=label)
    limits = axes.get_xlim()  # of the run, whatever is published

    # Without the first values, before the model knows which tokens are frequent.
    first = len(train) // 20
    shown = [*train.iloc[first:], *validation]
    tokens = losses["tokens"].dropna()
    last = tokens.index[-1]
    total = tokens.iloc[-1]
    curves = read_reference(reference)
    for index, name in enumerate(curves):
        points = curves[name]
        published = points[:, 0]
        steps = np.interp(published, [0, *tokens], [0, *tokens.index])
        beyond = published * last / total
        steps = np.where(published > total, beyond, steps)
        losses = points[:, 1]
        color = _GREYS[index % len(_GREYS)]
        if np.isnan(steps).all():
            label = f"{name} {losses[0]:.3f}"
            axes.axhline(losses[0], color=color, label=label)
        else:
            axes.plot(steps, losses, color=color, marker=".", label=name)
        is_before = steps < 0.05 * last
        is_beyond = steps > last
        within = losses[~is_before & ~is_beyond]
        shown += within.tolist()
    low = min(shown)
    span = max(shown) - low + 0.1
    axes.set_ylim(low - 0.1 * span, low + 1.6 * span)
    axes.set_xlim(limits)
    axes.legend(frameon=False, loc="upper right")
    figure.savefig(workdir / "loss.png")
