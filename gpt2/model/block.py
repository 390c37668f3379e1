"""One layer of GPT-2.

gpt2/model/gpt.py explains the letters of dimensions.
"""

import flax.linen as nn
import jax

from gpt2.config import GPTConfig
from gpt2.model.attention import Attention
from gpt2.model.layers import MLP, Mix, Norm
from gpt2.parallel.rules import constrain


class Block(nn.Module):
    """One layer: attention and MLP, each a residual branch with its norms.

    Attributes:
        config, layer: as for `Attention`.
    """

    config: GPTConfig
    layer: int | None

    @nn.compact
    def __call__(self, stream, cache, index, inputs, deterministic):
        """Returns the stream after the layer, and the layer's cache.

        Args:
            stream: `[B, T, D]` in the compute type, and the first layer's values as `Attention`
                has them.
            cache, index, inputs, deterministic: as for `Attention`.
        """
        cfg = self.config
        x, values = stream
        dropout = nn.Dropout(cfg.dropout, deterministic=deterministic)
        if inputs.embedded is not None:
            x = Mix(cfg, (1.0, 0.0), name="embedding_skip")(x, inputs.embedded)
        with jax.named_scope("attention"):
            attn = Attention(cfg, self.layer, name="attn")
            y, cache, values = attn(
                self._before("ln_1", x), cache, index, inputs, values, deterministic
            )
            between = self._after("ln_1", x, dropout(self._sandwich("ln_1_post", y)))
            between = constrain(between, "batch", "sequence", "embed")
        with jax.named_scope("mlp"):
            read = x if cfg.parallel_block else between
            y = MLP(cfg, name="mlp")(self._before("ln_2", read))
            x = self._after("ln_2", between, dropout(self._sandwich("ln_2_post", y)))
        return (constrain(x, "batch", "sequence", "embed"), values), cache

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
