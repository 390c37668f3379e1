"""Losses of the tokens 2, 3, ... on, by the same logits.

Gloeckle et al. 2024, arXiv 2404.19737, lightly, as modded-nanogpt has it. Logged as `loss_ahead_2`
and so on; weighted, they join the objective.
"""

import jax.numpy as jnp
from jax import Array

from gpt2.config import LossConfig
from gpt2.errors import UserError
from gpt2.model.losses.base import LossIngredient, Weight


class Ahead(LossIngredient):
    """`loss.ahead`, the weights, and `loss.ahead_fade`."""

    option = "ahead"

    @classmethod
    def is_wanted(cls, options: LossConfig) -> bool:
        """Returns whether there are weights."""
        if options.ahead_fade and not options.ahead:
            raise UserError("loss.ahead_fade is ignored without loss.ahead")
        return bool(options.ahead)

    def targets(
        self, targets: Array, segments: Array | None, step: Array
    ) -> dict[str, tuple[Array, Weight]]:
        """Returns the tokens 2, 3, ... on."""
        left: Weight = 1.0
        if self.options.ahead_fade:
            left = jnp.maximum(1 - step / self.options.ahead_fade, 0.0)
        weights = [left * float(weight) for weight in self.options.ahead.split(",")]
        length = targets.shape[1]
        if length <= len(weights):
            raise UserError(f"loss.ahead looks past rows of {length} tokens")
        return {
            f"loss_ahead_{distance + 1}": (
                targets_ahead(targets, segments, distance),
                weight,
            )
            for distance, weight in enumerate(weights, 1)
        }


def targets_ahead(targets: Array, segments: Array | None, distance: int) -> Array:
    """Returns the targets so many positions later in the same segment, `[B, T]`.

    A position without a target of its own, -1, has none.
    """
    seen = targets >= 0
    if segments is not None:
        seen = seen & (_later(segments, distance) == segments)
    return jnp.where(seen, _later(targets, distance), -1)


def _later(x: Array, k: int) -> Array:
    after_last = jnp.full_like(x[:, :k], -1)
    return jnp.concatenate([x[:, k:], after_last], axis=1)
