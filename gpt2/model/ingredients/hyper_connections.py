"""Hyper-connections: several residual streams, which branches read and write with learned weights.

This is the dynamic version of Zhu et al. 2024, arXiv 2409.19606. For n streams, each branch gets a
kernel `[D, n + 2]`, a norm, static weights `[n + 2, n]` and two scales. At initialisation a branch
reads one stream, and its output is added to all streams.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from gpt2.config import GPTConfig
from gpt2.model.layers import Norm, named_param
from gpt2.model.seams import Branch, Context, Ingredient, Sublayer
from gpt2.ops import Ops
from gpt2.ops.plain import Shape


class HyperConnections(Ingredient):
    """The ingredient that replaces the residual stream with `model.hyper_connections` streams."""

    option = "hyper_connections"

    def layers(self, gpt: nn.Module, layers: Sublayer, context: Context) -> Sublayer:
        """Wrap `layers`: copy the input `[B, T, D]` to n streams, and average the final streams."""

        def layers_with_streams(x: Array) -> Array:
            copies = (self.config.hyper_connections, *x.shape)
            streams = layers(jnp.broadcast_to(x, copies))
            return streams.mean(0)

        return layers_with_streams

    def branch(self, block: nn.Module, branch: Branch, context: Context) -> Branch:
        """Return the branch with a weighted sum of the streams as its input.

        The branch's output is added to n mixtures of the streams, with a weight for each mixture.
        """
        number = 1 if context.branch == "attention" else 2
        connect = HyperConnection(self.config, block.ops, name=f"connect_{number}")
        read, mixed, weights = connect(branch.stream, 2 * context.layer + number - 1)

        def weigh(y: Array) -> Array:
            return weights * branch.dropout(y)

        return branch._replace(read=read, stream=mixed, dropout=weigh)


class HyperConnection(nn.Module):
    """The learned weights with which one residual branch reads, mixes and writes the n streams."""

    config: GPTConfig
    ops: Ops

    @nn.compact
    def __call__(self, x: Array, branch: int | Array) -> tuple[Array, Array, Array]:
        """Compute the input of a branch, the mixed streams, and the weights of the branch's output.

        `x` holds the streams `[n, B, T, D]`. `branch` is the index of the branch among the model's
        2 L branches. The results are the input `[B, T, D]`, the mixed streams `[n, B, T, D]` to
        which the output is added, and the output's weight in each stream, `[n, B, T, 1]`.
        """
        cfg = self.config
        n = len(x)

        def init(key: Array, shape: Shape, dtype: str) -> Array:
            same = jnp.eye(n)
            one = same[branch % n]  # equation 14: branches read the streams in turn
            return jnp.stack([one, *same, jnp.ones(n)])

        zeros = nn.initializers.zeros
        small = nn.initializers.constant(0.01)
        axes = ("mix", "mix")
        shape = (cfg.embed_dim, n + 2)
        weights = named_param(self, "weights", init, (n + 2, n), axes)
        by_stream = named_param(self, "by_stream", zeros, shape, axes)
        scales = named_param(self, "scales", small, (2,), ("mix",))

        # The dynamic weights, computed from each token's streams, are added to the static weights.
        normalized = Norm(cfg, self.ops, name="norm")(x)
        dynamic = jnp.moveaxis(normalized @ by_stream, -1, 0)  # [n + 2, n, B, T]
        dynamic = jnp.tanh(dynamic)
        for_streams = scales[0] * dynamic[:-1]
        for_output = scales[1] * dynamic[-1:]
        dynamic = jnp.concatenate([for_streams, for_output])
        weights = weights[..., None, None] + dynamic
        weights = weights[..., None]

        def weighted_sum(by: Array) -> Array:
            return (by * x).sum(0).astype(cfg.compute_dtype)

        read, *mixed = [weighted_sum(by) for by in weights[:-1]]
        return read, jnp.stack(mixed), weights[-1].astype(cfg.compute_dtype)
