"""A learned logit per head that takes weight and gives nothing (gpt-oss, arXiv 2508.10925).

N numbers in each layer, 0 at the start; attention is its formula.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from gpt2.model.ingredients.base import Ingredient
from gpt2.model.layers import named_param
from gpt2.ops.plain import ScoreTerm


class AttentionSink(Ingredient):
    """`model.attention_sink`."""

    option = "attention_sink"

    def score_terms(self, attention: nn.Module) -> tuple[ScoreTerm, ...]:
        """Returns the sinks of all heads."""
        shape = (self.config.num_heads,)
        sinks = named_param(
            attention, "sinks", nn.initializers.zeros, shape, ("heads",)
        )

        def add_column(scores: Array, query: Array, key: Array) -> Array:
            shape = (*scores.shape[:-1], 1)
            column = jnp.broadcast_to(sinks[:, None, None], shape)
            return jnp.concatenate([scores, column], axis=-1)

        return (add_column,)
