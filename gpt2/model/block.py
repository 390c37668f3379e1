"""One layer of GPT-2.

gpt2/model/gpt.py explains the letters of dimensions.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from gpt2.config import GPTConfig
from gpt2.model.attention import Attention
from gpt2.model.layers import MLP, Mix, Norm
from gpt2.parallel.rules import constrain


class Stream(struct.PyTreeNode):
    """What goes from layer to layer.

    Attributes:
        x: `[B, T, D]` in the compute type, the residual stream.
        first_values: `[B, T, K, H]`, which the first layer fills in with its values, for
            `model.value_residual`; else None.
        middle: `[B, T, D]`, the stream after half of the layers, which the one after them fills in,
            for `model.backout`; else None.
    """

    x: jax.Array
    first_values: jax.Array | None = None
    middle: jax.Array | None = None


class Block(nn.Module):
    """One layer: attention and MLP, each a residual branch with its norms."""

    config: GPTConfig

    @nn.compact
    def __call__(self, stream, cache, layer, inputs, deterministic):
        """Returns the `Stream` after the layer, and the layer's cache.

        Args:
            stream: before the layer.
            cache, layer, inputs, deterministic: as for `Attention`.
        """
        cfg, x = self.config, stream.x
        if cfg.backout:
            middle = jnp.where(layer == cfg.num_layers // 2, x, stream.middle)
            stream = stream.replace(middle=middle)
        dropout = nn.Dropout(cfg.dropout, deterministic=deterministic)
        if inputs.embedded is not None:
            x = Mix(cfg, (1.0, 0.0), name="embedding_skip")(x, inputs.embedded)
        with jax.named_scope("attention"):
            attn = Attention(cfg, name="attn")
            y, cache, first_values = attn(
                self._before("ln_1", x), cache, layer, inputs, stream.first_values, deterministic
            )
            between = self._after("ln_1", x, dropout(self._sandwich("ln_1_post", y)))
            between = constrain(between, "batch", "sequence", "embed")
        with jax.named_scope("mlp"):
            read = x if cfg.parallel_block else between
            y = MLP(cfg, name="mlp")(self._before("ln_2", read))
            x = self._after("ln_2", between, dropout(self._sandwich("ln_2_post", y)))
        x = constrain(x, "batch", "sequence", "embed")
        return stream.replace(x=x, first_values=first_values), cache

    def _before(self, name, x):
        """Returns what a branch reads."""
        return x if self.config.norm_position == "post" else Norm(self.config, name=name)(x)

    def _sandwich(self, name, y):
        """Returns what a branch adds."""
        cfg = self.config
        return Norm(cfg, name=name)(y) if cfg.norm_position == "sandwich" else y

    def _after(self, name, x, y):
        """Returns the stream after a branch."""
        cfg = self.config
        return Norm(cfg, name=name)(x + y) if cfg.norm_position == "post" else x + y
