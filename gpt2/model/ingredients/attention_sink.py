"""A learned logit for each head, which joins the softmax of attention.

It acts like the logit of an additional key whose value vector is 0.

The source is gpt-oss, arXiv 2508.10925. Each layer gets N scalars, initialised to 0.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from gpt2.model.layers import named_param
from gpt2.model.seams import Context, Ingredient
from gpt2.ops.plain import ScoreTerm


class AttentionSink(Ingredient):
    """The ingredient `model.attention_sink`: a learned logit in the softmax of each head."""

    option = "attention_sink"

    def score_terms(
        self, attention: nn.Module, terms: tuple[ScoreTerm, ...], context: Context
    ) -> tuple[ScoreTerm, ...]:
        """Append a function that adds a column, the learned logit, to the scores of each head."""
        shape = (self.config.num_heads,)
        zeros = nn.initializers.zeros
        sinks = named_param(attention, "sinks", zeros, shape, ("heads",))

        def add_column(scores: Array, query: Array, key: Array) -> Array:
            shape = (*scores.shape[:-1], 1)
            column = jnp.broadcast_to(sinks[:, None, None], shape)
            return jnp.concatenate([scores, column], axis=-1)

        return (*terms, add_column)
