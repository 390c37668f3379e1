"""loss.png: the curves of a run, readable at a glance."""

from pathlib import Path

from gpt2.telemetry.metrics import read_metrics
from gpt2.telemetry.progress import format_count

_TRAIN, _VALIDATION, _MUTED = "#3b6fb6", "#d1495b", "#6b7280"


def plot_losses(metrics_jsonl: Path | str, png: Path | str, title: str = "") -> None:
    """Draws the training and validation loss of a run over steps and tokens.

    The training loss is drawn twice: each logged value, faint, and a moving average over about a
    thirtieth of the run. The first values, before the model knows which tokens are frequent, may
    leave the frame, so that the rest can be told apart.

    Args:
        metrics_jsonl: the run's metrics; nothing is drawn if it holds no loss.
        png: where the picture goes.
        title: above the picture, on the left.
    """
    records = read_metrics(metrics_jsonl)
    train = _series(records, "train/loss")
    validation = _series(records, "eval/loss")
    if not train[0] and not validation[0]:
        return

    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    with matplotlib.rc_context({"font.size": 11, "font.family": "sans-serif"}):
        figure = Figure(figsize=(9, 5.2), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        counts = FuncFormatter(lambda value, _: format_count(value))
        if train[0]:
            axes.plot(*train, color=_TRAIN, alpha=0.22, linewidth=1)
            window = max(1, len(train[1]) // 30)
            newest = sum(train[1][-window:]) / window
            smooth = _smooth(train[1], window)
            axes.plot(train[0], smooth, color=_TRAIN, linewidth=2, label=f"train {newest:.3f}")
        if validation[0]:
            best = min(validation[1])
            label = f"validation {validation[1][-1]:.3f}"
            if best < validation[1][-1]:
                label += f" (best {best:.3f})"
            axes.plot(
                *validation, color=_VALIDATION, linewidth=1.6, marker="o", markersize=4, label=label
            )
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats per token)")
        axes.set_ylim(*_limits(train[1], validation[1]))
        axes.set_xlim(0, 1.01 * max(1, records[-1]["step"]))
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.xaxis.set_major_formatter(counts)
        axes.grid(color="#e5e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(color=_MUTED, labelcolor=_MUTED)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.legend(frameon=False, loc="upper right")
        if title:
            axes.set_title(title, loc="left", fontweight="bold", y=1.1)
        if tokens_per_step := _tokens_per_step(records):
            tokens = axes.secondary_xaxis(
                "top",
                functions=(
                    lambda step: step * tokens_per_step,
                    lambda seen: seen / tokens_per_step,
                ),
            )
            tokens.set_xlabel("tokens", color=_MUTED, loc="right")
            tokens.xaxis.set_major_formatter(counts)
            tokens.tick_params(color=_MUTED, labelcolor=_MUTED)
            tokens.spines["top"].set_visible(False)
        figure.savefig(png)


def _series(records: list[dict], name: str) -> tuple[list[int], list[float]]:
    """Picks (steps, values) of one metric, without the steps that lack it or were not finite."""
    points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _smooth(values: list[float], window: int) -> list[float]:
    """Centred moving average, which does not lag; the window shrinks towards both ends."""
    half, last = window // 2, len(values) - 1
    reach = [min(half, i, last - i) for i in range(len(values))]
    return [sum(values[i - r : i + r + 1]) / (2 * r + 1) for i, r in enumerate(reach)]


def _limits(train: list[float], validation: list[float]) -> tuple[float, float]:
    """Frames all losses but those before a twentieth of the run, if these tower over the rest."""
    shown = train[len(train) // 20 :] + validation[len(validation) // 20 :]
    low, high = min(shown), max(shown)
    margin = 0.08 * (high - low) or 0.1
    return low - margin, high + margin


def _tokens_per_step(records: list[dict]) -> float | None:
    last = next((r for r in reversed(records) if r.get("tokens") and r["step"]), None)
    return last and last["tokens"] / last["step"]
