"""`c * tanh(logits / c)` before the loss (Gemma 2, arXiv 2408.00118, section 2).

A tanh for each logit.
"""

from gpt2.model.ingredients.base import Ingredient
from gpt2.ops.plain import LogitTerm
from gpt2.ops.terms import SoftCap


class LogitSoftCap(Ingredient):
    """`model.logit_softcap`."""

    option = "logit_softcap"

    def logit_terms(self) -> tuple[LogitTerm, ...]:
        """Returns the cap."""
        return (SoftCap(self.config.logit_softcap),)
