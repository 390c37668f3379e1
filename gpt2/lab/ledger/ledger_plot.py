"""The plot of a ledger's ideas."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from gpt2.errors import printable
from gpt2.lab.experiments.curve_plot import BASELINE, GREEN, GREY, ORANGE, RED, drawing
from gpt2.lab.experiments.decisions import Answer
from gpt2.lab.ledger.journal import Idea

_ANSWERS = {
    Answer.KEEP: GREEN,
    Answer.DISCARD: GREY,
    Answer.UNDECIDED: ORANGE,
    Answer.FAILED: RED,
}


def plot_ledger(png: Path, ideas: Sequence[Idea], gains: Mapping[int, float]) -> None:
    """Plot each idea at its number, with its interval, and the best version so far as a line.

    `gains` maps the number of each accepted idea to its loss minus the loss at the start of the
    ledger. The start itself has the number 0. An idea without a score is a cross.
    """
    with drawing(png, height=5) as (axes,):
        numbers = [*gains, len(ideas) + 0.5]
        losses = [*gains.values(), min(gains.values())]
        axes.step(
            numbers, losses, where="post", color=BASELINE, label="best version so far"
        )
        for answer, color in _ANSWERS.items():
            axes.plot([], [], "o", color=color, label=answer)
        axes.plot([], [], "x", color=GREY, label="no score at the ledger's size")
        for idea in ideas:
            # An idea without an answer has the color `BASELINE`.
            color = _ANSWERS.get(idea.answer, BASELINE)
            difference, low, _ = idea.interval
            loss = gains[idea.best] + np.nan_to_num(difference)
            error = np.nan_to_num(difference - low, posinf=0.0)
            marker = "o" if idea.pairs else "x"
            axes.errorbar(idea.number, loss, yerr=error, fmt=marker, color=color)
            if idea.number in gains:
                # The name is below the line, where nothing else is drawn.
                axes.text(
                    idea.number,
                    loss,
                    f"{printable(idea.text)}  ",
                    ha="right",
                    va="top",
                    rotation=30,
                    rotation_mode="anchor",
                )
        low, high = axes.get_ylim()
        axes.set_ylim(bottom=low - 0.5 * (high - low))  # leaves space for names
        axes.locator_params(axis="x", integer=True)
        axes.set_xlabel("idea")
        axes.set_ylabel(
            "difference from the start (nats per token)\nbars: intervals, with 3 pairs or more"
        )
