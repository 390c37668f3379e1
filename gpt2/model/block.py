"""One block of GPT-2: attention and an MLP.

gpt2/model/gpt.py explains the dimension letters.
"""

import flax.linen as nn
import jax
from jax import Array

from gpt2.config import GPTConfig
from gpt2.model.attention import Attention
from gpt2.model.ingredients import ingredients_of
from gpt2.model.layers import MLP, Norm
from gpt2.model.seams import Branch, Context, Sublayer
from gpt2.ops import Ops

Stream = tuple[Array, dict[str, Array]]  # [B, T, D], and `Context.carried`


class Block(nn.Module):
    """One layer: attention and an MLP, each in a residual branch with its own norm."""

    config: GPTConfig
    ops: Ops

    @nn.compact
    def __call__(
        self, stream: Stream, layer: int | Array, context: Context
    ) -> tuple[Stream, None]:
        """Apply the layer with the index `layer`.

        `stream` is a pair: the residual stream `[B, T, D]`, and the dict `Context.carried`. The
        first output is the new pair. The second is None, because `nn.scan` expects two outputs.
        """
        cfg, ops = self.config, self.ops
        x, carried = stream
        context = context.replace(layer=layer, carried=dict(carried))
        for ingredient in ingredients_of(cfg):
            x = ingredient.block_input(self, x, context)
        context = context.replace(block_input=x)
        drop = nn.Dropout(cfg.dropout, deterministic=context.deterministic)

        def dropout(y: Array) -> Array:
            """Apply dropout to a branch's output and, with CompleteP, divide by the depth ratio."""
            y = drop(y)
            # CompleteP, arXiv 2505.01618: the stream is a sum of 2 L terms, so each term is divided
            # by the ratio of L to the base depth.
            if cfg.mup_base_depth:
                y = y / cfg.depth_ratio
            return y

        def attention(x: Array) -> Array:
            return Attention(cfg, ops, name="attn")(x, context)

        def mlp(x: Array) -> Array:
            return MLP(cfg, ops, name="mlp")(x)

        with jax.named_scope("attention"):
            context = context.replace(branch="attention")
            x = self._add_branch(x, attention, dropout, context)
        with jax.named_scope("mlp"):
            context = context.replace(branch="mlp")
            x = self._add_branch(x, mlp, dropout, context)
        return (x, context.carried), None

    @nn.nowrap
    def _add_branch(
        self, x: Array, sublayer: Sublayer, dropout: Sublayer, context: Context
    ) -> Array:
        """Add the output of the attention or MLP branch to `x`, and return the result `[B, T, D]`.

        In GPT-2, the result is `x + dropout(sublayer(norm(x)))`.
        """
        cfg = self.config
        name = "ln_1" if context.branch == "attention" else "ln_2"
        norm = Norm(cfg, self.ops, name=name)
        # In a parallel block, attention and MLP read the same stream (GPT-J, GPT-NeoX).
        read = context.block_input if cfg.parallel_block else x
        branch = Branch(read, x, sublayer, dropout)
        for ingredient in ingredients_of(cfg):
            branch = ingredient.branch(self, branch, context)
        read, x, sublayer, dropout = branch

        if cfg.norm_position == "pre":  # GPT-2
            x = x + dropout(sublayer(norm(read)))
        elif cfg.norm_position == "post":  # Vaswani et al. 2017
            x = norm(x + dropout(sublayer(read)))
        else:  # sandwich: Gemma 2, arXiv 2408.00118
            second_norm = Norm(cfg, self.ops, name=f"{name}_post")
            x = x + dropout(second_norm(sublayer(norm(read))))
        return self.ops.constrain(x, "batch", "sequence", "embed")
