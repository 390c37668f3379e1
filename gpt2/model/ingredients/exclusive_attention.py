"""Removes from attention's output its component along the position's own value.

Zhai 2026, arXiv 2603.09078. No parameters.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from gpt2.model.seams import Context, Ingredient

TINY = 1e-24  # in place of the squared length of a value that is 0


class ExclusiveAttention(Ingredient):
    """`model.exclusive_attention`."""

    option = "exclusive_attention"

    def attention_output(
        self, attention: nn.Module, y: Array, context: Context
    ) -> Array:
        """Project the output of each head off its value."""
        v = context.heads.v
        group = y.shape[2] // v.shape[2]
        own = jnp.repeat(v, group, axis=2)
        own = own.astype(jnp.float32)
        square = (own * own).sum(-1, keepdims=True)
        product = (y * own).sum(-1, keepdims=True)
        component = product / jnp.maximum(square, TINY)
        return (y - component * own).astype(y.dtype)
