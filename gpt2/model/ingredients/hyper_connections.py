"""Several residual streams, which each branch reads and writes by learned weights.

Zhu et al. 2024, arXiv 2409.19606, dynamic. A branch has a kernel `[D, n + 2]`, a norm and some
numbers. At first it reads one stream, and all stay as they are and get its output.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from gpt2.config import GPTConfig
from gpt2.model.ingredients.base import Branch, Flow, Ingredient
from gpt2.model.layers import Norm, named_param
from gpt2.ops import Ops
from gpt2.ops.plain import Shape


class HyperConnections(Ingredient):
    """`model.hyper_connections`, the number of streams."""

    option = "hyper_connections"

    def enter(self, gpt: nn.Module, x: Array, flow: Flow) -> Array:
        """Makes the stream `[B, T, D]` several, `[n, B, T, D]`."""
        return jnp.broadcast_to(x, (self.config.hyper_connections, *x.shape))

    def branch(
        self, block: nn.Module, number: int, branch: Branch, flow: Flow
    ) -> Branch:
        """Lets the branch read a sum of the streams, and adds weighted outputs to them, mixed."""
        connect = HyperConnection(self.config, block.ops, name=f"connect_{number}")
        read, mixed, weights = connect(branch.read, 2 * flow.layer + number - 1)
        return branch._replace(read=read, add=lambda y: mixed + weights * y)

    def leave(self, gpt: nn.Module, x: Array, flow: Flow) -> Array:
        """Returns the mean of the streams."""
        return x.mean(0)


class HyperConnection(nn.Module):
    """The weights of one branch."""

    config: GPTConfig
    ops: Ops

    @nn.compact
    def __call__(self, x: Array, branch: int | Array) -> tuple[Array, Array, Array]:
        """Returns what branch number `branch` reads, the streams mixed, and weights `[n, B, T, 1]`.

        The streams are `x`, `[n, B, T, D]`; a branch reads `[B, T, D]`.
        """
        cfg = self.config
        n = len(x)

        def init(key: Array, shape: Shape, dtype: str) -> Array:
            same = jnp.eye(n)
            one = same[branch % n]
            return jnp.stack([one, *same, jnp.ones(n)])

        zeros = nn.initializers.zeros
        small = nn.initializers.constant(0.01)
        axes = ("mix", "mix")
        shape = (cfg.embed_dim, n + 2)
        weights = named_param(self, "weights", init, (n + 2, n), axes)
        by_stream = named_param(self, "by_stream", zeros, shape, axes)
        scales = named_param(self, "scales", small, (2,), ("mix",))
        normed = Norm(cfg, self.ops, name="norm")(x)
        moved = jnp.moveaxis(normed @ by_stream, -1, 0)  # [n + 2, n, B, T]
        moved = jnp.tanh(moved)
        of_streams = scales[0] * moved[:-1]
        of_output = scales[1] * moved[-1:]
        moved = jnp.concatenate([of_streams, of_output])
        weights = weights[..., None, None] + moved
        weights = weights[..., None]

        def weighted(by: Array) -> Array:
            return (by * x).sum(0).astype(cfg.compute_dtype)

        read, *mixed = [weighted(each) for each in weights[:-1]]
        return read, jnp.stack(mixed), weights[-1].astype(cfg.compute_dtype)
