"""One layer of GPT-2.

gpt2/model/gpt.py explains the letters of dimensions.
"""

import flax.linen as nn
import jax
from jax import Array

from gpt2.config import GPTConfig
from gpt2.model.attention import Attention
from gpt2.model.ingredients import Branch, Flow, MakeModule, ingredients_of
from gpt2.model.layers import MLP, Norm
from gpt2.ops import Ops

Stream = tuple[Array, dict[str, Array]]  # [B, T, D], and what ingredients carry


class Block(nn.Module):
    """One layer: attention and MLP, each a residual branch with a norm before it."""

    config: GPTConfig
    ops: Ops

    @nn.compact
    def __call__(
        self, stream: Stream, layer: int | Array, flow: Flow
    ) -> tuple[Stream, None]:
        """Returns the stream after the layer, as a scan's body does."""
        cfg, ops = self.config, self.ops
        x, carried = stream
        flow = flow.replace(layer=layer, carried=dict(carried))
        for extra in ingredients_of(cfg):
            x = extra.before_layer(self, x, flow)
        flow = flow.replace(entered=x)
        drop = nn.Dropout(cfg.dropout, deterministic=flow.deterministic)

        with jax.named_scope("attention"):
            branch = self._branch(1, x, drop, flow)
            attention = Attention(cfg, ops, name="attn")
            y = attention(branch.norm(branch.read), flow)
            x = ops.constrain(branch.add(branch.drop(y)), "batch", "sequence", "embed")

        with jax.named_scope("mlp"):
            branch = self._branch(2, x, drop, flow)
            make: MakeModule = MLP
            for extra in ingredients_of(cfg):
                make = extra.mlp(self, make, flow)
            mlp = make(cfg, ops, name="mlp")
            y = mlp(branch.norm(branch.read))
            x = ops.constrain(branch.add(branch.drop(y)), "batch", "sequence", "embed")
        return (x, flow.carried), None

    @nn.nowrap
    def _branch(self, number: int, x: Array, drop: nn.Dropout, flow: Flow) -> Branch:
        norm = Norm(self.config, self.ops, name=f"ln_{number}")
        branch = Branch(read=x, norm=norm, drop=drop, add=lambda y: x + y)
        for extra in ingredients_of(self.config):
            branch = extra.branch(self, number, branch, flow)
        return branch
