"""A learned fraction of the middle layer's input, subtracted from the last layer's output.

The sources are modded-nanogpt and nanochat. The model gets one scalar, initialised to 0.2 as in
nanochat, and an array `[B, T, D]` that is passed from layer to layer.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from gpt2.model.layers import named_param
from gpt2.model.seams import Context, Ingredient, Sublayer


class Backout(Ingredient):
    """The ingredient `model.backout`, described at the top of this file."""

    option = "backout"

    def layers(self, gpt: nn.Module, layers: Sublayer, context: Context) -> Sublayer:
        """Wrap `layers`: subtract a fraction of the middle layer's input from the result."""

        def layers_without_middle(x: Array) -> Array:
            context.carried[self.option] = x  # replaced at the middle layer
            x = layers(x)
            init = nn.initializers.constant(0.2)
            fraction = named_param(gpt, "backout", init, (1,), ("mix",))
            x_rest = x - fraction * context.carried[self.option]
            return x_rest.astype(x.dtype)

        return layers_without_middle

    def block_input(self, block: nn.Module, x: Array, context: Context) -> Array:
        """Store the input of the middle layer, whose index is `num_layers // 2`."""
        is_middle = context.layer == self.config.num_layers // 2
        stored = context.carried[self.option]
        context.carried[self.option] = jnp.where(is_middle, x, stored)
        return x
