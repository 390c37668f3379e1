"""The weighted square of the log of softmax's normaliser (PaLM, arXiv 2204.02311, section 5).

It keeps logits near 0: a number a row.
"""

from jax import Array

from gpt2.model.losses.base import LossIngredient


class ZLoss(LossIngredient):
    """`loss.z_loss`, the weight."""

    option = "z_loss"

    def term(self, logits: Array, log_normaliser: Array, at_targets: Array) -> Array:
        """Returns the weighted square."""
        return self.options.z_loss * log_normaliser**2
