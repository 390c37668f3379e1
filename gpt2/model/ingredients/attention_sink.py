"""A learned logit per head that takes weight and gives nothing (gpt-oss, arXiv 2508.10925).

N numbers in each layer, 0 at the start. cuDNN cannot compute it: attention is its formula on GPUs.
"""

import flax.linen as nn

from gpt2.model.ingredients.base import Ingredient
from gpt2.model.layers import named_param
from gpt2.ops.plain import ScoreTerm
from gpt2.ops.terms import Sinks


class AttentionSink(Ingredient):
    """`model.attention_sink`."""

    option = "attention_sink"
    score_term = Sinks

    def score_terms(self, attention: nn.Module) -> tuple[ScoreTerm, ...]:
        """Returns the sinks of all heads."""
        shape = (self.config.num_heads,)
        return (
            Sinks(
                named_param(
                    attention, "sinks", nn.initializers.zeros, shape, ("heads",)
                )
            ),
        )
