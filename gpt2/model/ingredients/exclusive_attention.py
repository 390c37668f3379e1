"""Attention's output loses its part along the position's own value (Zhai 2026, arXiv 2603.09078).

One more pass over attention's output and the values; no parameters.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from gpt2.model.ingredients.base import Heads, Ingredient

TINY = 1e-24  # in place of the squared length of a value that is 0


class ExclusiveAttention(Ingredient):
    """`model.exclusive_attention`."""

    option = "exclusive_attention"

    def attended(self, attention: nn.Module, y: Array, x: Array, heads: Heads) -> Array:
        """Projects the output of each head off its value."""
        v = heads.v
        group = y.shape[2] // v.shape[2]
        own = jnp.repeat(v, group, axis=2)
        own = own.astype(jnp.float32)
        square = (own * own).sum(-1, keepdims=True)
        along = (y * own).sum(-1, keepdims=True)
        share = along / jnp.maximum(square, TINY)
        return (y - share * own).astype(y.dtype)
