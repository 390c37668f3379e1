"""The curves of a run, readable at a glance: loss.png, and lines of text for a terminal."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.telemetry.metrics import read_metrics
from gpt2.telemetry.reference import read_reference


def _read_losses(metrics_jsonl: Path | str) -> tuple[Any, Any, float, float]:
    """Returns training and validation losses by step, as pandas Series, and the range to draw."""
    import pandas as pd

    records = pd.DataFrame(read_metrics(metrics_jsonl), columns=["step", "train/loss", "eval/loss"])
    records = records.set_index("step").astype(float)
    train, validation = records["train/loss"].dropna(), records["eval/loss"].dropna()
    # Without the first values, before the model knows which tokens are frequent.
    late = pd.concat([train.iloc[len(train) // 20 :], validation])
    return train, validation, late.min(), late.max()


def plot_losses(workdir: Path, shares: dict[str, float], reference: str = "") -> None:
    """Draws loss.png: validation, training (faint) and its mean, and `shares` of time by name.

    The published losses of `reference` lie at the steps by which the run has read as many tokens.
    """
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    metrics_jsonl = workdir / "metrics.jsonl"
    train, validation, low, high = _read_losses(metrics_jsonl)
    if train.empty:
        return
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
    newest = [record for record in read_metrics(metrics_jsonl) if "tokens" in record][-1]
    per_step, last = newest["tokens"] / newest["step"], newest["step"]
    for index, (name, points) in enumerate(read_reference(reference).items()):
        look: dict[str, Any] = dict(color=("0.25", "0.5", "0.65", "0.8")[index % 4], linestyle="--")
        steps = points[:, 0] / per_step
        if np.isnan(steps).all():
            axes.axhline(points[0, 1], label=f"{name} {points[0, 1]:.3f}", **look)
        else:
            axes.plot(steps, points[:, 1], marker=".", label=name, **look)
        beyond = (steps < 0.05 * last) | (steps > last)
        shown = [low, high, *points[~beyond, 1]]
        low, high = min(shown), max(shown)
    span = high - low
    axes.set_ylim(low - 0.08 * span - 0.01, high + span / 2 + 0.01)
    axes.legend(frameon=False, loc="upper right")
    axes.grid(alpha=0.3)
    left = 0.0
    for name, share in shares.items():
        text = f"{name} {share:.0%}" if share > 0.005 * len(name) + 0.02 else ""
        time.bar_label(time.barh(0, share, left=left), [text], label_type="center", fontsize=7)
        left += share
    time.set(xlim=(0, 1), title="time since the first start")
    time.set_axis_off()
    figure.savefig(workdir / "loss.png")


def losses_as_text(metrics_jsonl: Path | str, height: int = 6) -> str:
    """Returns the curves in indented lines: training losses as blocks, validation losses as `o`."""
    train, validation, low, high = _read_losses(metrics_jsonl)
    if train.empty:
        return ""
    width, last = min(shutil.get_terminal_size().columns, 80) - 10, train.index[-1]
    unit = (high - low) / height or 1.0  # of a line
    # A line of metrics has the mean since the one before, so its columns are those up to its own.
    means = train.groupby((train.index * width - 1) // last).mean().reindex(range(width)).bfill()
    eighths = ((means - low) / unit * 8).clip(1, 8 * height).round().astype(int)
    rows = [[" ▁▂▃▄▅▆▇█"[min(max(n - 8 * row, 0), 8)] for n in eighths] for row in range(height)]
    for step, loss in validation.items():
        rows[min(int((loss - low) / unit), height - 1)][(step * width - 1) // last] = "o"
    named = zip([f"{low:.3f}", *[""] * (height - 2), f"{high:.3f}"], rows, strict=True)
    lines = [f"{name:>9} {''.join(row).rstrip()}" for name, row in named]
    lines.insert(0, f"{'':10}training loss over {last} steps; o: validation")
    return "\n".join(reversed(lines))
