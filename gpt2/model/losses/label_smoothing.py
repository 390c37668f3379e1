"""A share of each target for all tokens alike (Szegedy et al. 2016, section 7).

One more pass over the logits.
"""

from jax import Array

from gpt2.model.losses.base import LossIngredient


class LabelSmoothing(LossIngredient):
    """`loss.label_smoothing`, the share."""

    option = "label_smoothing"

    def term(self, logits: Array, log_normaliser: Array, at_targets: Array) -> Array:
        """Returns how far targets are above the mean, times the share."""
        share = self.options.label_smoothing
        return share * (at_targets - logits.mean(axis=-1, keepdims=True))
