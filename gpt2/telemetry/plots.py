"""loss.png: the curves of a run, readable at a glance."""

import importlib.util
from pathlib import Path

import numpy as np

from gpt2.errors import warn
from gpt2.telemetry.metrics import read_metrics


def plot_losses(metrics_jsonl: Path | str, png: Path | str, title: str = "") -> None:
    """Draws the training and validation loss of a run over its steps, if there are any.

    The training loss is drawn twice: each logged value, faint, and a moving average over about a
    thirtieth of the run.
    """
    records = read_metrics(metrics_jsonl)
    train, validation = _series(records, "train/loss"), _series(records, "eval/loss")
    if not (train.size or validation.size):
        return
    if importlib.util.find_spec("matplotlib") is None:  # a rented machine may lack it
        return warn(f"{png} is not drawn: matplotlib is not installed")
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    figure = Figure(figsize=(9, 5.2), dpi=150, layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="step", ylabel="loss (nats per token)")
    if train.size:
        smooth = _smooth(train[1], max(1, train.shape[1] // 30))
        axes.plot(*train, color="C0", alpha=0.22, linewidth=1)
        axes.plot(train[0], smooth, color="C0", label=f"train {smooth[-1]:.3f} (smoothed)")
        # Without the first values, before the model knows which tokens are frequent.
        late = np.concatenate([train[1, train.shape[1] // 20 :], validation[1]])
        axes.set_ylim(late.min() - 0.08 * np.ptp(late) - 0.01, late.max() + np.ptp(late) / 2 + 0.01)
    if validation.size:
        label = f"validation {validation[1, -1]:.3f} (best {validation[1].min():.3f})"
        axes.plot(*validation, color="C3", marker="o", markersize=4, label=label)
    axes.legend(frameon=False, loc="upper right")
    axes.grid(alpha=0.3)
    figure.savefig(png)


def _series(records: list[dict], name: str) -> np.ndarray:
    """Returns steps and values of one metric, [2, N], without those that lack it."""
    points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    return np.array(points, float).reshape(-1, 2).T


def _smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Returns a centred moving average, narrow at both ends."""
    half = window // 2
    reach = [min(i, half, len(values) - 1 - i) for i in range(len(values))]
    return np.array([values[i - r : i + r + 1].mean() for i, r in enumerate(reach)])
