"""Before the head, takes off a learned share of the stream after half of the layers.

modded-nanogpt, nanochat. One number, 0.2 at the start as in nanochat; the stream of the middle is
kept through the later layers.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from gpt2.model.ingredients.base import Flow, Ingredient
from gpt2.model.layers import named_param


class Backout(Ingredient):
    """`model.backout`."""

    option = "backout"

    def enter(self, gpt: nn.Module, x: Array, flow: Flow) -> Array:
        """Makes room for the middle."""
        flow.carried[self.option] = x
        return x

    def before_layer(self, block: nn.Module, x: Array, flow: Flow) -> Array:
        """Keeps what enters the layer after the middle."""
        is_middle = flow.layer == self.config.num_layers // 2
        kept = flow.carried[self.option]
        flow.carried[self.option] = jnp.where(is_middle, x, kept)
        return x

    def leave(self, gpt: nn.Module, x: Array, flow: Flow) -> Array:
        """Takes the share off."""
        init = nn.initializers.constant(0.2)
        share = named_param(gpt, "backout", init, (1,), ("mix",))
        rest = x - share * flow.carried[self.option]
        return rest.astype(x.dtype)
