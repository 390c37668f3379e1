"""Adds a gated share of the token before to each (modded-nanogpt, nanochat).

The gate reads the first 24 entries of the token itself, and all 25 weights begin at 0.
"""

import flax.linen as nn
import jax
from jax import Array

from gpt2.config import GPTConfig
from gpt2.model.ingredients.base import Flow
from gpt2.model.ingredients.previous_token import PreviousToken
from gpt2.model.layers import named_param
from gpt2.ops import Ops

WIDTH = 24  # entries of an embedding that open its gate, as in nanochat


class Smear(PreviousToken):
    """`model.smear`."""

    option = "smear"

    def embedded(self, gpt: nn.Module, x: Array, flow: Flow) -> Array:
        """Adds the shares."""
        last = gpt.wte(self.last_tokens(flow))
        before = self.before(x, last, flow, missing=0)
        return SmearedTokens(self.config, gpt.ops, name="smear")(x, before)


class SmearedTokens(nn.Module):
    """The gate and the share."""

    config: GPTConfig
    ops: Ops

    @nn.compact
    def __call__(self, x: Array, before: Array) -> Array:
        """Returns the sum, `[B, T, D]` in the compute type; `before` is `x` a position earlier."""
        zeros = nn.initializers.zeros
        width = min(WIDTH, self.config.embed_dim)
        weights = named_param(self, "gate", zeros, (width,), ("mix",))
        share = named_param(self, "share", zeros, (1,), ("mix",))
        gate = jax.nn.sigmoid(x[..., :width] @ weights)
        gate = gate[..., None]
        y = x + share * gate * before
        return y.astype(self.config.compute_dtype)
