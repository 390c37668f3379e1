"""A learned weighted sum of each block's input and the embedded tokens (modded-nanogpt).

Each layer gets two scalars, initialised to 1 for its input and 0 for the embedded tokens.
"""

import flax.linen as nn
from jax import Array

from gpt2.model.ingredients.mix import Mix
from gpt2.model.seams import Context, Ingredient, Sublayer


class EmbeddingSkip(Ingredient):
    """The ingredient `model.embedding_skip`: each block also reads the embedded tokens."""

    option = "embedding_skip"

    def layers(self, gpt: nn.Module, layers: Sublayer, context: Context) -> Sublayer:
        """Wrap `layers`: store its input, the embedded tokens with positions, for all blocks."""

        def layers_with_embedding(x: Array) -> Array:
            context.shared[self.option] = x
            return layers(x)

        return layers_with_embedding

    def block_input(self, block: nn.Module, x: Array, context: Context) -> Array:
        """Return the weighted sum of a block's input and the embedded tokens."""
        mix = Mix(self.config, block.ops, (1.0, 0.0), name="embedding_skip")
        return mix(x, context.shared[self.option])
