"""loss.png: the curves of a run, readable at a glance."""

import importlib.util
from pathlib import Path

import numpy as np

from gpt2.errors import warn
from gpt2.telemetry.metrics import read_metrics

_TRAIN, _VALIDATION, _GRID = "#3b6fb6", "#d1495b", "#e5e7eb"


def plot_losses(metrics_jsonl: Path | str, png: Path | str, title: str = "") -> None:
    """Draws the training and validation loss of a run over its steps, and a scale of tokens.

    The training loss is drawn twice: each logged value, faint, and a moving average over about a
    thirtieth of the run. Nothing is drawn without a loss.
    """
    records = read_metrics(metrics_jsonl)
    train = _series(records, "train/loss")
    validation = _series(records, "eval/loss")
    if not (train.size or validation.size):
        return
    if importlib.util.find_spec("matplotlib") is None:  # a rented machine may lack it
        return warn(f"{png} is not drawn: matplotlib is not installed")
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figure = Figure(figsize=(9, 5.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    if train.size:
        smooth = _smooth(train[1], max(1, train.shape[1] // 30))
        axes.plot(*train, color=_TRAIN, alpha=0.22, linewidth=1)
        label = f"train {smooth[-1]:.3f} (smoothed)"
        axes.plot(train[0], smooth, color=_TRAIN, linewidth=2, label=label)
    if validation.size:
        label = f"validation {validation[1, -1]:.3f} (best {validation[1].min():.3f})"
        axes.plot(*validation, color=_VALIDATION, marker="o", markersize=4, label=label)
    axes.set(title=title, xlabel="step", ylabel="loss (nats per token)")
    axes.set_xlim(0, 1.01 * max(1, records[-1]["step"]))
    axes.set_ylim(*_limits(train[1], validation[1]))
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))
    axes.legend(frameon=False, loc="upper right")
    axes.grid(color=_GRID, linewidth=0.8)
    axes.spines[:].set_visible(False)
    counted = [r["tokens"] / r["step"] for r in records if r.get("tokens") and r["step"]]
    if counted:
        each = counted[-1]
        tokens = axes.secondary_xaxis("top", functions=(lambda x: x * each, lambda x: x / each))
        tokens.set_xlabel("tokens", loc="right")
        tokens.xaxis.set_major_formatter(EngFormatter(sep=""))
        tokens.spines[:].set_visible(False)
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


def _limits(train: np.ndarray, validation: np.ndarray) -> tuple[float, float]:
    """Frames all losses, or those after a twentieth of the run if all need twice the height."""
    late = np.concatenate([train[len(train) // 20 :], validation[len(validation) // 20 :]])
    low, high = late.min(), late.max()
    every = np.concatenate([train, validation])
    if np.ptp(every) <= 2 * (high - low):
        low, high = every.min(), every.max()
    margin = 0.08 * (high - low) or 0.1
    return low - margin, high + margin
