"""A learned mix of the first embedding into the input of every block (modded-nanogpt).

Two numbers in each layer, 1 and 0 at the start.
"""

import flax.linen as nn
from jax import Array

from gpt2.model.ingredients.base import Flow, Ingredient
from gpt2.model.ingredients.mix import Mix


class EmbeddingSkip(Ingredient):
    """`model.embedding_skip`."""

    option = "embedding_skip"

    def enter(self, gpt: nn.Module, x: Array, flow: Flow) -> Array:
        """Hands the embedding to all layers."""
        flow.shared[self.option] = x
        return x

    def before_layer(self, block: nn.Module, x: Array, flow: Flow) -> Array:
        """Mixes it in."""
        mix = Mix(self.config, block.ops, (1.0, 0.0), name="embedding_skip")
        return mix(x, flow.shared[self.option])
