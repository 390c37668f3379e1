"""Subtracts a learned fraction of the residual stream in the middle from that at the end.

modded-nanogpt, nanochat. Adds one scalar, which begins at 0.2 as in nanochat, and an array that
lives through the later layers.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from gpt2.model.layers import named_param
from gpt2.model.seams import Context, Ingredient, Layer


class Backout(Ingredient):
    """`model.backout`."""

    option = "backout"

    def layers(self, gpt: nn.Module, layers: Layer, context: Context) -> Layer:
        """Subtract the fraction after the last layer."""

        def layers_without_middle(x: Array) -> Array:
            context.carried[self.option] = x  # until a layer stores the middle
            x = layers(x)
            init = nn.initializers.constant(0.2)
            fraction = named_param(gpt, "backout", init, (1,), ("mix",))
            x_rest = x - fraction * context.carried[self.option]
            return x_rest.astype(x.dtype)

        return layers_without_middle

    def block_input(self, block: nn.Module, x: Array, context: Context) -> Array:
        """Store the input of the layer after the middle."""
        is_middle = context.layer == self.config.num_layers // 2
        stored = context.carried[self.option]
        context.carried[self.option] = jnp.where(is_middle, x, stored)
        return x
