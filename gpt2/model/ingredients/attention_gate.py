"""A gate on the output of each head: the sigmoid of a linear map of attention's input.

Qiu et al. 2025, arXiv 2505.06708. Each layer gets a linear map from D dimensions to N gates. Gates
start near one half, as in the paper.
"""

import flax.linen as nn
import jax
from jax import Array

from gpt2.model.layers import Linear
from gpt2.model.seams import Context, Ingredient


class AttentionGate(Ingredient):
    """The ingredient `model.attention_gate`: a gate on the output of each head."""

    option = "attention_gate"

    def attention_output(
        self, attention: nn.Module, y: Array, context: Context
    ) -> Array:
        """Multiply the output of each head by its gate."""
        cfg = self.config
        ops = attention.ops
        shape = (cfg.embed_dim, cfg.num_heads)
        linear = Linear(cfg, ops, shape, ("embed", "heads"), name="c_gate")
        gate = ops.constrain(
            linear(context.attention_input), "batch", "length", "heads"
        )
        gate = jax.nn.sigmoid(gate)
        return y * gate[..., None]
