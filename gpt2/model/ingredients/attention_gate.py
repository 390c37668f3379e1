"""A gate on each head's output: the sigmoid of a linear map of the block's input.

Qiu et al. 2025, arXiv 2505.06708. A kernel `[D, N]` in each layer; half open at the start, as in
the paper.
"""

import flax.linen as nn
import jax
from jax import Array

from gpt2.model.ingredients.base import Heads, Ingredient
from gpt2.model.layers import Linear


class AttentionGate(Ingredient):
    """`model.attention_gate`."""

    option = "attention_gate"

    def attended(self, attention: nn.Module, y: Array, x: Array, heads: Heads) -> Array:
        """Multiplies heads by their gates."""
        cfg = self.config
        ops = attention.ops
        shape = (cfg.embed_dim, cfg.num_heads)
        gate = Linear(cfg, ops, shape, ("embed", "heads"), name="c_gate")(x)
        gate = ops.constrain(gate, "batch", "length", "heads")
        gate = jax.nn.sigmoid(gate)
        return y * gate[..., None]
