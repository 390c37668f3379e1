"""Adds a vector for each pair of tokens, found by a hash.

modded-nanogpt; Engram, arXiv 2601.07372. A table of `model.bigram_embeddings` rows,
0 at the start, which the optimizer has to keep.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from gpt2.model.ingredients.base import Flow
from gpt2.model.ingredients.previous_token import PreviousToken
from gpt2.model.layers import Embedding


class BigramEmbeddings(PreviousToken):
    """`model.bigram_embeddings`."""

    option = "bigram_embeddings"

    def embedded(self, gpt: nn.Module, x: Array, flow: Flow) -> Array:
        """Adds the vectors."""
        cfg = self.config
        rows = cfg.bigram_embeddings
        before = self.before(
            flow.tokens, self.last_tokens(flow), flow, missing=cfg.vocab_size
        )
        table = Embedding(
            cfg, gpt.ops, rows, ("vocab", "table"), stddev=0.0, name="bigram"
        )
        return x + table(hashed(flow.tokens, before, rows))


def hashed(tokens: Array, before: Array, num_rows: int) -> Array:
    """Returns the row of a table for each pair of tokens, int32; factors as in modded-nanogpt."""
    first = before.astype(jnp.uint32) * 27191
    second = tokens.astype(jnp.uint32) * 36313
    mixed = first ^ second
    return (mixed % num_rows).astype(jnp.int32)
