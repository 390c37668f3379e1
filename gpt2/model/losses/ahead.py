"""Losses of the tokens 2, 3, ... on, by the same logits.

Gloeckle et al. 2024, arXiv 2404.19737, lightly, as modded-nanogpt has it. Logged as `loss_ahead_2`
and so on; their weights are in the gradient of the loss, not in its sum.
"""

import jax.numpy as jnp
from jax import Array

from gpt2.errors import UserError
from gpt2.model.losses.base import LossIngredient, Question


class Ahead(LossIngredient):
    """`loss.ahead`, the weights, and `loss.ahead_fade`."""

    option = "ahead"

    def ask(
        self, question: Question, segments: Array | None, step: Array | None
    ) -> Question:
        """Adds targets, in training alone."""
        if step is None:
            return question
        left: Array | float = 1.0
        if self.options.ahead_fade:
            left = jnp.maximum(1 - step / self.options.ahead_fade, 0.0)
        weights = [left * float(weight) for weight in self.options.ahead.split(",")]
        length = question.targets.shape[1]
        if length <= len(weights):
            raise UserError(f"loss.ahead looks past rows of {length} tokens")
        names = [f"loss_ahead_{k + 2}" for k in range(len(weights))]
        return question._replace(
            targets=targets_ahead(question.targets[..., 0], segments, 1 + len(weights)),
            objective=question.objective._replace(weights=tuple(weights)),
            names=("loss", *names),
        )


def targets_ahead(targets: Array, segments: Array | None, number: int) -> Array:
    """Returns each position's target and those of the next ones in its segment, [B, T, number].

    A position without a target of its own, -1, has no others.
    """
    valid = targets >= 0
    each = [targets]
    for k in range(1, number):
        seen = valid
        if segments is not None:
            seen = valid & (_later(segments, k) == segments)
        each.append(jnp.where(seen, _later(targets, k), -1))
    return jnp.stack(each, axis=2)


def _later(x: Array, k: int) -> Array:
    after_last = jnp.full_like(x[:, :k], -1)
    return jnp.concatenate([x[:, k:], after_last], axis=1)
