"""`c * tanh(scores / c)` before softmax (Gemma 2, arXiv 2408.00118, section 2).

A tanh for each score. cuDNN cannot compute it: attention is its formula on GPUs.
"""

import flax.linen as nn

from gpt2.model.ingredients.base import Ingredient
from gpt2.ops.plain import ScoreTerm, SoftCap


class AttentionSoftCap(Ingredient):
    """`model.attention_softcap`."""

    option = "attention_softcap"
    score_term = SoftCap

    def score_terms(self, attention: nn.Module) -> tuple[ScoreTerm, ...]:
        """Returns the cap."""
        return (SoftCap(self.config.attention_softcap),)
