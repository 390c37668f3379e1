"""Value residuals: the first layer's values of attention, mixed into the values of every layer.

Zhou et al. 2024, arXiv 2410.17897. Each layer adds the first layer's values to its own, with two
learned weights, initialised to one half. The first layer's values are passed from layer to layer.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from gpt2.model.ingredients.mix import Mix
from gpt2.model.seams import Context, Heads, Ingredient, Sublayer


class ValueResidual(Ingredient):
    """The ingredient `model.value_residual`: every layer mixes in the first layer's values."""

    option = "value_residual"

    def layers(self, gpt: nn.Module, layers: Sublayer, context: Context) -> Sublayer:
        """Wrap `layers`: store an array of zeros, which layer 0 replaces with its values."""
        cfg = self.config
        shape = (*context.tokens.shape, cfg.kv_heads, cfg.head_size)

        def layers_with_values(x: Array) -> Array:
            values = jnp.zeros(shape, x.dtype)
            values = gpt.ops.constrain(values, "batch", "length", "heads", "head_size")
            context.carried[self.option] = values
            return layers(x)

        return layers_with_values

    def heads(self, attention: nn.Module, heads: Heads, context: Context) -> Heads:
        """Mix the first layer's values into the values of this layer.

        The first layer mixes its values with themselves, so that the parameters of every layer have
        the same names and shapes.
        """
        first = context.carried[self.option]
        first = jnp.where(context.layer == 0, heads.v, first)
        context.carried[self.option] = first
        mix = Mix(self.config, attention.ops, (0.5, 0.5), name="value_residual")
        return heads._replace(v=mix(heads.v, first))
