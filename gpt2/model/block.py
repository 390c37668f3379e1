"""One layer of GPT-2.

gpt2/model/gpt.py explains the letters of dimensions.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from gpt2.config import GPTConfig
from gpt2.model.attention import Attention
from gpt2.model.layers import MLP, HyperConnection, Mix, Norm
from gpt2.parallel.rules import constrain


class Stream(struct.PyTreeNode):
    """What goes from layer to layer.

    Attributes:
        x: `[B, T, D]` in the compute type, the residual stream; `[n, B, T, D]` where there are n,
            for `model.hyper_connections`.
        first_values: `[B, T, K, H]`, which the first layer fills in with its values, for
            `model.value_residual`; else None.
        middle: as `x`, the stream after half of the layers, which the one after them fills in,
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
        cfg = self.config
        x = stream.x
        if cfg.backout:
            middle = jnp.where(layer == cfg.num_layers // 2, x, stream.middle)
            stream = stream.replace(middle=middle)
        dropout = nn.Dropout(cfg.dropout, deterministic=deterministic)
        if inputs.embedded is not None:
            x = Mix(cfg, (1.0, 0.0), name="embedding_skip")(x, inputs.embedded)
        axes = *("mix",) * (cfg.hyper_connections > 0), "batch", "sequence", "embed"
        with jax.named_scope("attention"):
            read, add = self._connect("connect_1", x, 2 * layer)
            attn = Attention(cfg, name="attn")
            y, cache, first_values = attn(
                self._before("ln_1", read),
                cache,
                layer,
                inputs,
                stream.first_values,
                deterministic,
            )
            between = self._after("ln_1", add(dropout(self._sandwich("ln_1_post", y))))
            between = constrain(between, *axes)
        with jax.named_scope("mlp"):
            read, add = self._connect("connect_2", between, 2 * layer + 1)
            y = MLP(cfg, name="mlp")(
                self._before("ln_2", x if cfg.parallel_block else read)
            )
            x = self._after("ln_2", add(dropout(self._sandwich("ln_2_post", y))))
        x = constrain(x, *axes)
        return stream.replace(x=x, first_values=first_values), cache

    def _connect(self, name, x, branch):
        """Returns what a branch reads of the stream, and a function that adds its output."""
        if not self.config.hyper_connections:
            return x, lambda y: x + y
        read, mixed, weights = HyperConnection(self.config, name=name)(x, branch)
        return read, lambda y: mixed + weights * y

    def _before(self, name, x):
        """Returns what a branch reads."""
        return (
            x
            if self.config.norm_position == "post"
            else Norm(self.config, name=name)(x)
        )

    def _sandwich(self, name, y):
        """Returns what a branch adds."""
        return (
            Norm(self.config, name=name)(y)
            if self.config.norm_position == "sandwich"
            else y
        )

    def _after(self, name, x):
        """Returns the stream after a branch, of which `x` is the sum."""
        return (
            Norm(self.config, name=name)(x)
            if self.config.norm_position == "post"
            else x
        )
