"""loss.png: the curves of a run, readable at a glance."""

from pathlib import Path

from gpt2.telemetry.metrics import read_metrics


def plot_losses(metrics_jsonl: Path | str, png: Path | str, title: str = "") -> None:
    """Draws validation loss, training loss (faint) and its moving average over a run's steps."""
    import pandas as pd
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    records = pd.DataFrame(read_metrics(metrics_jsonl), columns=["step", "train/loss", "eval/loss"])
    records = records.set_index("step").astype(float)
    train, validation = records["train/loss"].dropna(), records["eval/loss"].dropna()
    if train.empty:
        return
    figure = Figure(figsize=(9, 5.2), dpi=150, layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="step", ylabel="loss (nats per token)")
    smooth = train.rolling(max(1, len(train) // 30), min_periods=1, center=True).mean()
    axes.plot(train, color="C0", alpha=0.22, linewidth=1)
    axes.plot(smooth, color="C0", label=f"train {smooth.iloc[-1]:.3f} (smoothed)")
    # Without the first values, before the model knows which tokens are frequent.
    late = pd.concat([train.iloc[len(train) // 20 :], validation])
    span = late.max() - late.min()
    axes.set_ylim(late.min() - 0.08 * span - 0.01, late.max() + span / 2 + 0.01)
    if not validation.empty:
        label = f"validation {validation.iloc[-1]:.3f} (best {validation.min():.3f})"
        axes.plot(validation, color="C3", marker="o", markersize=4, label=label)
    axes.legend(frameon=False, loc="upper right")
    axes.grid(alpha=0.3)
    figure.savefig(png)
