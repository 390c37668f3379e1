"""Plot the losses of a run as loss.png."""

from pathlib import Path

import numpy as np

from gpt2.telemetry.metrics import read_metrics
from gpt2.telemetry.reference import read_reference
from gpt2.utils.stores import url_or_path


def plot_losses(workdir: Path, reference: str = "") -> None:
    """Plot the validation losses, the training losses and their rolling mean in loss.png.

    `workdir` contains metrics.jsonl, and the plot is written there. `reference` is the value of
    `logging.reference`. Its published losses are plotted at the steps at which the run has trained
    on the same number of tokens. Without training losses, nothing is written.
    """
    import pandas as pd
    from matplotlib.figure import Figure  # pyplot would have global state and windows
    from matplotlib.ticker import MaxNLocator

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
    axes.set_title(url_or_path(workdir), parse_math=False)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    window = 2 * (len(train) // 60) + 1  # odd, so that the mean is centred
    rolling = train.rolling(window, min_periods=1, center=True)
    smooth = rolling.mean()
    axes.plot(train, color="C0", alpha=0.22)
    mean = f" (line: mean of {window} log lines)" if window > 1 else ""
    axes.plot(smooth, color="C0", label=f"train {train.iloc[-1]:.3f}{mean}")
    if not validation.empty:
        best = validation.min()
        newest = validation.iloc[-1]
        label = f"validation {newest:.3f} (best {best:.3f})"
        axes.plot(validation, color="C3", marker=".", label=label)
    axes.set_xlim(axes.get_xlim())  # published losses must not widen the run's range

    # A published loss comes with a number of tokens, but the axis shows steps. The step at which
    # this run has trained on the same number of tokens is interpolated between its log lines,
    # beginning with 0 tokens at step 0. After the end of the run, steps are proportional to tokens.
    tokens = losses["tokens"].dropna()
    known_tokens = [0, *tokens, 1e6 * tokens.iloc[-1]]
    known_steps = [0, *tokens.index, 1e6 * tokens.index[-1]]
    axes.set_prop_cycle(color=["0.25", "0.5", "0.65", "0.8"])
    for name, points in read_reference(reference).items():
        published_tokens, level = points.T
        if np.isnan(published_tokens).all():
            axes.axhline(level[0], color="0.4", label=f"{name} {level[0]:.3f}")
        else:
            steps = np.interp(published_tokens, known_tokens, known_steps)
            axes.plot(steps, level, marker=".", label=name)
    # Before the model has learned which tokens are frequent, its losses are so high that they would
    # flatten the rest of the plot.
    first = len(train) // 20
    shown = [*train.iloc[first:], *validation]
    span = max(shown) - min(shown) + 0.1
    axes.set_ylim(top=max(shown) + 0.4 * span)
    # The legend is below the plot, where it hides no curve.
    figure.legend(frameon=False, loc="outside lower center", ncols=2)
    figure.savefig(workdir / "loss.png")
