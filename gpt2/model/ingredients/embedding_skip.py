"""A learned mix of the first embedding into the input of every block (modded-nanogpt).

Adds two scalars to each layer, which begin at 1 and 0.
"""

import flax.linen as nn
from jax import Array

from gpt2.model.ingredients.mix import Mix
from gpt2.model.seams import Context, Ingredient, Layer


class EmbeddingSkip(Ingredient):
    """`model.embedding_skip`."""

    option = "embedding_skip"

    def layers(self, gpt: nn.Module, layers: Layer, context: Context) -> Layer:
        """Store the embedding for all layers."""

        def layers_with_embedding(x: Array) -> Array:
            context.shared[self.option] = x
            return layers(x)

        return layers_with_embedding

    def block_input(self, block: nn.Module, x: Array, context: Context) -> Array:
        """Mix the embedding in."""
        mix = Mix(self.config, block.ops, (1.0, 0.0), name="embedding_skip")
        return mix(x, context.shared[self.option])
