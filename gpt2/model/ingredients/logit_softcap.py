"""`c * tanh(logits / c)` before the loss (Gemma 2, arXiv 2408.00118, section 2).

A tanh for each logit.
"""

from jax import Array

from gpt2.model.ingredients.base import Ingredient
from gpt2.ops.plain import SoftCap


class LogitSoftCap(Ingredient):
    """`model.logit_softcap`."""

    option = "logit_softcap"

    def logits(self, logits: Array) -> Array:
        """Caps them."""
        return SoftCap(self.config.logit_softcap)(logits)
