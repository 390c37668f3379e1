"""Mixes the first layer's values into others' (Zhou et al. 2024, arXiv 2410.17897).

Two numbers in each layer, halves at the start; one more array from layer to layer.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from gpt2.model.ingredients.base import Flow, Heads, Ingredient
from gpt2.model.ingredients.mix import Mix


class ValueResidual(Ingredient):
    """`model.value_residual`."""

    option = "value_residual"

    def enter(self, gpt: nn.Module, x: Array, flow: Flow) -> Array:
        """Makes room for the first layer's values."""
        cfg = self.config
        B, T = x.shape[-3:-1]
        shape = (B, T, cfg.kv_heads, cfg.head_size)
        values = jnp.zeros(shape, x.dtype)
        values = gpt.ops.constrain(values, "batch", "length", "heads", "head_size")
        flow.carried[self.option] = values
        return x

    def heads(self, attention: nn.Module, heads: Heads, flow: Flow) -> Heads:
        """Mixes them in; the first layer mixes in its own, so that all layers are alike."""
        first = flow.carried[self.option]
        first = jnp.where(flow.layer == 0, heads.v, first)
        flow.carried[self.option] = first
        ops = attention.ops
        mix = Mix(self.config, ops, (0.5, 0.5), name="value_residual")
        return heads._replace(v=mix(heads.v, first))
