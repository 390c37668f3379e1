"""Smear: a gated fraction of the previous token's embedding, added to each token's embedding.

The sources are modded-nanogpt and nanochat. The gate reads the first 24 entries of the token's own
embedding. The 24 weights of the gate, and a learned factor of the gate's output, are initialised
to 0.
"""

import flax.linen as nn
import jax
from jax import Array

from gpt2.config import GPTConfig
from gpt2.model.ingredients.previous_token import first_previous, shift
from gpt2.model.layers import named_param
from gpt2.model.seams import Context, Ingredient
from gpt2.ops import Ops

GATE_WIDTH = 24  # as in nanochat


class Smear(Ingredient):
    """The ingredient `model.smear`: add a part of the previous token's embedding to each token."""

    option = "smear"

    def embedded(self, gpt: nn.Module, x: Array, context: Context) -> Array:
        """Add the gated fraction of the previous token's embedding to each token."""
        first = gpt.wte(first_previous(context))
        previous = shift(x, first, context, missing=0)
        return SmearedTokens(self.config, gpt.ops, name="smear")(x, previous)


class SmearedTokens(nn.Module):
    """Adds a gated fraction of the previous token's embedding to each token's embedding."""

    config: GPTConfig
    ops: Ops

    @nn.compact
    def __call__(self, x: Array, previous: Array) -> Array:
        """Return embeddings `x` `[B, T, D]` plus a fraction of `previous`, in the compute dtype.

        `previous` `[B, T, D]` holds the embedding of the token before each position.
        """
        zeros = nn.initializers.zeros
        width = min(GATE_WIDTH, self.config.embed_dim)
        weights = named_param(self, "gate", zeros, (width,), ("mix",))
        fraction = named_param(self, "share", zeros, (1,), ("mix",))
        gate = jax.nn.sigmoid(x[..., :width] @ weights)
        gate = gate[..., None]
        y = x + fraction * gate * previous
        return y.astype(self.config.compute_dtype)
