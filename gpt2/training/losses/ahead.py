"""Losses for the tokens 2, 3, ... positions ahead, computed from the logits of the next token.

This is a light form of Gloeckle et al. 2024, arXiv 2404.19737, as in modded-nanogpt.
"""

import jax.numpy as jnp
from jax import Array

from gpt2.config import LossConfig
from gpt2.ops import plain
from gpt2.training.losses.term import LossTerm
from gpt2.utils.trees import Batch, Sums


class Ahead(LossTerm):
    """The weighted losses of the tokens 2, 3, ... positions ahead.

    `loss.ahead` lists the weights. If `loss.ahead_fade` is not 0, the weights fall to 0 over this
    number of steps. The unweighted losses are logged as `loss_ahead_2`, `loss_ahead_3`, ...
    """

    option = "ahead"

    def __init__(self, options: LossConfig):
        super().__init__(options)
        self.weights = [float(weight) for weight in options.ahead.split(",")]

    def arrays(self, batch: Batch) -> Batch:
        """Return the targets `[B, T]` of each loss, by the loss's name."""
        arrays = Batch()
        for distance in range(1, len(self.weights) + 1):
            targets = targets_ahead(batch["targets"], batch.get("segments"), distance)
            arrays[_name(distance)] = targets
        return arrays

    def sums(
        self, logits: Array, log_normaliser: Array, batch: Batch, step: Array | None
    ) -> tuple[Array | float, Sums]:
        """Return the weighted sum of all losses, and the unweighted sums by name.

        In validation, return 0 and no sums.
        """
        objective: Array | float = 0.0
        sums = Sums()
        if step is None:
            return objective, sums
        remaining: Array | float = 1.0
        if self.options.ahead_fade:
            remaining = jnp.maximum(1 - step / self.options.ahead_fade, 0.0)
        for distance, weight in enumerate(self.weights, 1):
            targets = batch[_name(distance)]
            losses = log_normaliser - plain.target_logits(logits, targets)
            total, count = plain.masked_sum(losses, targets)
            objective += remaining * weight * total
            sums[_name(distance)] = total, count
        return objective, sums


def _name(distance: int) -> str:
    return f"loss_ahead_{distance + 1}"


def targets_ahead(targets: Array, segments: Array | None, distance: int) -> Array:
    """Return the targets `[B, T]` that are `distance` positions later in the same segment.

    The result is -1 where there is no such target, and where a position's own target is -1.
    """
    exists = targets >= 0
    if segments is not None:
        exists = exists & (_later(segments, distance) == segments)
    return jnp.where(exists, _later(targets, distance), -1)


def _later(x: Array, distance: int) -> Array:
    after_last = jnp.full_like(x[:, :distance], -1)
    return jnp.concatenate([x[:, distance:], after_last], axis=1)
