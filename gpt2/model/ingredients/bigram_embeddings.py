"""An embedding for each pair of adjacent tokens, looked up by a hash of the pair.

The sources are modded-nanogpt, and Engram, arXiv 2601.07372. The model gets a table of
`model.bigram_embeddings` rows, initialised to 0.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from gpt2.model.ingredients.previous_token import first_previous, shift
from gpt2.model.layers import Embedding
from gpt2.model.seams import Context, Ingredient


class BigramEmbeddings(Ingredient):
    """The ingredient `model.bigram_embeddings`: an embedding for each pair of adjacent tokens."""

    option = "bigram_embeddings"

    def embedded(self, gpt: nn.Module, x: Array, context: Context) -> Array:
        """Add to each token the embedding of its pair with the previous token."""
        cfg = self.config
        rows = cfg.bigram_embeddings
        tokens = context.tokens
        # The first token of a segment is paired with the id `vocab_size`, which no token has.
        previous = shift(
            tokens, first_previous(context), context, missing=cfg.vocab_size
        )
        axes = ("vocab", "table")
        table = Embedding(cfg, gpt.ops, rows, axes, stddev=0.0, name="bigram")
        return x + table(hash_pairs(tokens, previous, rows))


def hash_pairs(tokens: Array, previous: Array, num_rows: int) -> Array:
    """Return the hash of each pair `(previous, token)`, int32 `[B, T]`, as in modded-nanogpt.

    The hash is from 0 to `num_rows - 1`: it is the index of the pair's row in the table.
    """
    first = previous.astype(jnp.uint32) * 27191
    second = tokens.astype(jnp.uint32) * 36313
    mixed = first ^ second
    return (mixed % num_rows).astype(jnp.int32)
