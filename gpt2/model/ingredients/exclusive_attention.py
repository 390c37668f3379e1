"""Exclusive attention removes from a head's output the component along the position's value.

Zhai 2026, arXiv 2603.09078. Exclusive attention has no parameters.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from gpt2.model.seams import Context, Ingredient

TINY = 1e-24  # avoids a division by 0 where attention's value vector is 0


class ExclusiveAttention(Ingredient):
    """The ingredient `model.exclusive_attention`.

    The output of each head is orthogonal to the head's value at the same position.
    """

    option = "exclusive_attention"

    def attention_output(
        self, attention: nn.Module, y: Array, context: Context
    ) -> Array:
        """Make the output of each head orthogonal to the value at the same position."""
        v = context.heads.v
        group = y.shape[2] // v.shape[2]
        own = jnp.repeat(v, group, axis=2)
        own = own.astype(jnp.float32)
        square = (own * own).sum(-1, keepdims=True)
        product = (y * own).sum(-1, keepdims=True)
        component = product / jnp.maximum(square, TINY)
        return (y - component * own).astype(y.dtype)
