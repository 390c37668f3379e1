"""loss.png: the curves of a run, readable at a glance."""

import importlib.util
from pathlib import Path
from typing import Any

from gpt2.errors import warn
from gpt2.telemetry.metrics import read_metrics
from gpt2.utils.text import format_count

_TRAIN, _VALIDATION, _MUTED, _GRID = "#3b6fb6", "#d1495b", "#6b7280", "#e5e7eb"


def plot_losses(metrics_jsonl: Path | str, png: Path | str, title: str = "") -> None:
    """Draws the training and validation loss of a run over steps and tokens.

    The training loss is drawn twice: each logged value, faint, and a moving average over about a
    thirtieth of the run. The first values, before the model knows which tokens are frequent, are in
    the frame unless they would take more than half of its height, as they do in long runs.

    Args:
        metrics_jsonl: the run's metrics; nothing is drawn if it holds no loss.
        png: where the picture goes; a warning takes its place without matplotlib.
        title: above the picture, on the left.
    """
    records = read_metrics(metrics_jsonl)
    train = _series(records, "train/loss")
    validation = _series(records, "eval/loss")
    if not train[0] and not validation[0]:
        return

    if importlib.util.find_spec("matplotlib") is None:  # a rented machine may lack it
        return warn(f"{png} is not drawn: matplotlib is not installed")
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    with matplotlib.rc_context({"font.size": 11, "font.family": "sans-serif"}):
        figure = Figure(figsize=(9, 5.2), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        if train[0]:
            window = max(1, len(train[1]) // 30)
            newest = sum(train[1][-window:]) / window
            smooth = _smooth(train[1], window)
            axes.plot(*train, color=_TRAIN, alpha=0.22, linewidth=1)
            axes.plot(
                train[0], smooth, color=_TRAIN, linewidth=2, label=f"train {newest:.3f} (smoothed)"
            )
        if validation[0]:
            best, newest = min(validation[1]), validation[1][-1]
            label = f"validation {newest:.3f}" + (f" (best {best:.3f})" if best < newest else "")
            style: dict[str, Any] = dict(linewidth=1.6, marker="o", markersize=4)
            axes.plot(*validation, color=_VALIDATION, label=label, **style)
        axes.legend(frameon=False, loc="upper right")
        axes.set_title(title, loc="left", fontweight="bold", y=1.1)
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats per token)")
        axes.set_xlim(0, 1.01 * max(1, records[-1]["step"]))
        axes.set_ylim(*_limits(train[1], validation[1]))
        axes.grid(color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        _style_ticks(axes)
        if tokens_per_step := _tokens_per_step(records):
            scale = (lambda step: step * tokens_per_step, lambda seen: seen / tokens_per_step)
            tokens = axes.secondary_xaxis("top", functions=scale)
            tokens.set_xlabel("tokens", color=_MUTED, loc="right")
            _style_ticks(tokens)
        figure.savefig(png)


def _style_ticks(axes) -> None:
    """Puts short whole numbers along the x axis, and no frame around it."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    axes.tick_params(color=_MUTED, labelcolor=_MUTED)
    axes.spines[:].set_visible(False)


def _series(records: list[dict], name: str) -> tuple[list[int], list[float]]:
    """Picks (steps, values) of one metric, without the steps that lack it or were not finite."""
    points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _smooth(values: list[float], window: int) -> list[float]:
    """Centred moving average: it does not lag, follows the steep start, and ends calmly."""
    half = window // 2
    smooth = []
    for i in range(len(values)):
        reach = min(i, half)  # narrow at the start; at the end only the left half is full
        near = values[i - reach : i + reach + 1]
        smooth.append(sum(near) / len(near))
    return smooth


def _limits(train: list[float], validation: list[float]) -> tuple[float, float]:
    """Frames all losses, or those after a twentieth of the run if all need twice the height."""
    late = train[len(train) // 20 :] + validation[len(validation) // 20 :]
    low, high = min(late), max(late)
    lowest, highest = min(train + validation), max(train + validation)
    if highest - lowest <= 2 * (high - low):
        low, high = lowest, highest
    margin = 0.08 * (high - low) or 0.1
    return low - margin, high + margin


def _tokens_per_step(records: list[dict]) -> float | None:
    last = next((r for r in reversed(records) if r.get("tokens") and r["step"]), None)
    return last and last["tokens"] / last["step"]
