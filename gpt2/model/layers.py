"""What a block is made of beside attention: linear maps, norms, mixes, tables, the MLP.

gpt2/model/gpt.py explains the letters of dimensions.
"""

import math
from collections.abc import Callable
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gpt2.config import GPTConfig
from gpt2.ops import ACTIVATIONS, GATES, linear, linear_parts, norm, pad_rows
from gpt2.parallel.fsdp import gather_parameter, look_up
from gpt2.parallel.rules import constrain, param_shards, vocab_multiple


def named_param(
    module: Any,
    name: str,
    init: Callable,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
) -> jax.Array:
    """Returns a parameter of a module that has a `config`; rules spread it by its axes' names."""
    init = nn.with_logical_partitioning(init, axes)
    return module.param(name, init, shape, module.config.param_dtype, unbox=True)


class Linear(nn.Module):
    """A linear map from the last axes of its input to new ones.

    Attributes:
        config: gives the types, and whether there is a bias.
        shape: of the kernel: contracted axes, then new ones.
        axes: names of the kernel's axes.
        num_contract: how many axes are contracted.
        in_parts: whether to return a list of results, one for each index of the first new axis.
        is_projection: whether it is a branch's last map, whose result joins the residual stream.
        activation: applied to the input first, elementwise.
    """

    config: GPTConfig
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    num_contract: int = 1
    in_parts: bool = False
    is_projection: bool = False
    activation: Callable[[jax.Array], jax.Array] | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        """Maps `[..., C1, .., Cn]` to `[..., O1, .., Om]` in the compute type."""
        cfg = self.config
        contracted = self.num_contract
        shards = param_shards(
            self.axes, forget=cfg.remat == "none" and not cfg.loops_over_layers
        )
        shape = shards.shard_shape(self.shape) if shards else self.shape
        normal = nn.initializers.normal(self._stddev())
        kernel = named_param(self, "kernel", normal, shape, self.axes)
        bias = None
        if cfg.bias:
            outputs = self.shape[contracted:]
            axes = self.axes[contracted:]
            bias = named_param(self, "bias", nn.initializers.zeros, outputs, axes)
        how: dict[str, Any] = dict(dtype=cfg.compute_dtype, shards=shards)
        if self.in_parts:
            y: Any = linear_parts(x, kernel, bias, **how)
        else:
            y = linear(
                x,
                kernel,
                bias,
                num_contract=contracted,
                activation=self.activation,
                **how,
            )
        return checkpoint_name(y, "/".join(self.path[-2:]))

    def _stddev(self) -> float:
        """Returns the stddev of the kernel, as `model.init` says.

        Two branches in each layer add to the residual stream. Their last kernels are smaller by
        the root of the number of branches, which keeps its variance (GPT-2, section 2.3).
        """
        cfg = self.config
        fan_in = math.prod(self.shape[: self.num_contract])
        outputs = zip(self.shape, self.axes, strict=True)
        fan_out = math.prod(
            size for size, axis in list(outputs)[self.num_contract :] if axis != "qkv"
        )
        stddev = {
            "normal": cfg.init_std / cfg.width_ratio**0.5,
            "xavier": (2.0 / (fan_in + fan_out)) ** 0.5,
            "fan_in": fan_in**-0.5,
        }[cfg.init]
        if not self.is_projection:
            return stddev
        return (
            0.0 if cfg.zero_init_projections else stddev / (2 * cfg.num_layers) ** 0.5
        )


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019); statistics in float32.

    Attributes:
        config: gives the kind, and the types.
        axis: name of the axis that is normalised.
        kind: `layernorm` or `rmsnorm`, if not that of `config`.
    """

    config: GPTConfig
    axis: str = "norm"
    kind: str = ""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis of `x` `[..., D]`; returns it in the compute type."""
        cfg = self.config
        kind = self.kind or self.config.norm
        chex.assert_axis_dimension(
            x, -1, cfg.embed_dim if self.axis == "norm" else cfg.head_size
        )
        shape = x.shape[-1:]
        center = kind == "layernorm"
        bias = None
        scale = named_param(self, "scale", nn.initializers.ones, shape, (self.axis,))
        if center and cfg.bias:
            bias = named_param(self, "bias", nn.initializers.zeros, shape, (self.axis,))
        return norm(
            x, scale, bias, center=center, eps=cfg.norm_eps, dtype=cfg.compute_dtype
        )


class Mix(nn.Module):
    """A learnt sum of two arrays, weighted by two numbers.

    Attributes:
        config: gives the types.
        init_weights: the two weights at the start.
    """

    config: GPTConfig
    init_weights: tuple[float, float]

    @nn.compact
    def __call__(self, x: jax.Array, other: jax.Array) -> jax.Array:
        """Returns the weighted sum of `x` and `other`, of one shape, in the compute type."""
        chex.assert_equal_shape([x, other])
        init = lambda key, shape, dtype: jnp.array(self.init_weights, dtype)  # noqa: E731
        weights = named_param(self, "weights", init, (2,), ("mix",))
        return (weights[0] * x + weights[1] * other).astype(self.config.compute_dtype)


class Smear(nn.Module):
    """Adds a gated share of the token before (modded-nanogpt, nanochat).

    The gate reads the first entries of the token itself, and all weights begin at 0.
    """

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array, before: jax.Array) -> jax.Array:
        """Returns the sum, `[B, T, D]` in the compute type; `before` is `x` a position earlier."""
        chex.assert_equal_shape([x, before])
        width = self.config.smear_width
        zeros = nn.initializers.zeros
        weights = named_param(self, "gate", zeros, (width,), ("mix",))
        share = named_param(self, "share", zeros, (1,), ("mix",))
        gate = jax.nn.sigmoid(x[..., :width] @ weights)[..., None]
        return (x + share * gate * before).astype(self.config.compute_dtype)


class HyperConnection(nn.Module):
    """What a branch reads of several streams, and how much of its output each gets.

    Zhu et al. 2024, dynamic. At first it reads one stream, and all stay and get the output.
    """

    config: GPTConfig

    @nn.compact
    def __call__(
        self, x: jax.Array, branch: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns what branch number `branch` reads, the streams mixed, and weights [n, B, T, 1].

        The streams are `x`, [n, B, T, D]; a branch reads [B, T, D].
        """
        cfg = self.config
        n = len(x)
        init = lambda *_: jnp.stack([jnp.eye(n)[branch % n], *jnp.eye(n), jnp.ones(n)])  # noqa: E731
        weights = named_param(self, "weights", init, (n + 2, n), ("mix", "mix"))
        shape = (cfg.embed_dim, n + 2)
        zeros = nn.initializers.zeros
        by_stream = named_param(self, "by_stream", zeros, shape, ("mix", "mix"))
        scales = named_param(
            self, "scales", nn.initializers.constant(0.01), (2,), ("mix",)
        )
        moved = jnp.tanh(jnp.moveaxis(Norm(cfg, name="norm")(x) @ by_stream, -1, 0))
        moved = jnp.concatenate([scales[0] * moved[:-1], scales[1] * moved[-1:]])
        weights = (weights[..., None, None] + moved)[..., None]
        sums: Any = (sum(map(jnp.multiply, w, x)) for w in weights[:-1])
        read, *mixed = (y.astype(cfg.compute_dtype) for y in sums)
        return read, jnp.stack(mixed), weights[-1].astype(cfg.compute_dtype)


class Embedding(nn.Module):
    """A table of vectors, looked up by integers.

    Attributes:
        config: gives the types, and the width of a vector if `width` does not.
        num_rows: how many vectors there are.
        axes: names of the table's axes.
        stddev: of the table's normal initialisation.
        width: of a vector; 0: D.
    """

    config: GPTConfig
    num_rows: int
    axes: tuple[str, str]
    stddev: float
    width: int = 0

    def setup(self):
        """Creates the table, `[num_rows, D]`, of which `embedding` may be a shard."""
        shape: tuple[int, ...] = (self.num_rows, self.width or self.config.embed_dim)
        self.shards = param_shards(self.axes)
        shape = self.shards.shard_shape(shape) if self.shards else shape
        normal = nn.initializers.normal(self.stddev)
        self.embedding: jax.Array = named_param(
            self, "embedding", normal, shape, self.axes
        )

    def __call__(self, indices: jax.Array, table: jax.Array | None = None) -> jax.Array:
        """Returns the rows of `indices` [B, T], int32, as [B, T, D] in the compute type.

        They are taken from `table`, which `padded` returned, if that is given.
        """
        dtype = self.config.compute_dtype
        if table is None or len(table) == self.num_rows:
            table = self.embedding
        else:  # what the stored table lacks, the padded one lacks too
            exists = (-self.num_rows <= indices) & (indices < self.num_rows)
            indices = jnp.where(exists, indices % self.num_rows, len(table))
        if self.shards:
            return look_up(table, indices, dtype)
        return jnp.take(table, indices, axis=0).astype(dtype)

    def padded(self) -> jax.Array:
        """Returns the table with rows of zeros up to a multiple of `vocab_multiple`.

        A program that looks up tokens and computes logits does both with the same such array: the
        two gradients add up in the padded table, and nothing copies them.
        """
        # As stored, by columns.
        return constrain(pad_rows(self.embedding, vocab_multiple()), "rows", "table")

    def first(self, num_rows: int) -> jax.Array:
        """Returns the first rows, [num_rows, D] in the compute type.

        Their gradient needs no scatter, unlike that of `__call__`.
        """
        rows = self.embedding[:num_rows]
        dtype = self.config.compute_dtype
        return (
            gather_parameter(rows, self.shards, dtype)
            if self.shards
            else rows.astype(dtype)
        )


def hashed(tokens: jax.Array, before: jax.Array, num_rows: int) -> jax.Array:
    """Returns the row of a table for each pair of tokens, int32; factors as in modded-nanogpt."""
    mixed = (tokens.astype(jnp.uint32) * 36313) ^ (before.astype(jnp.uint32) * 27191)
    return (mixed % num_rows).astype(jnp.int32)


class MLP(nn.Module):
    """Two linear maps around an activation; gated forms have a third (Shazeer 2020)."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `x` `[B, T, D]` to `[B, T, D]` in the compute type."""
        cfg = self.config
        D = cfg.embed_dim
        F = cfg.hidden_dim
        chex.assert_shape(x, (None, None, D))
        hidden = Linear(cfg, (D, F), ("embed", "mlp"), name="c_fc")(x)
        hidden = constrain(hidden, "batch", "length", "mlp")
        if cfg.is_gated:
            gate = Linear(cfg, (D, F), ("embed", "mlp"), name="c_gate")(x)
            hidden = GATES[cfg.activation](gate) * hidden
        activation = None if cfg.is_gated else ACTIVATIONS[cfg.activation]
        how: dict[str, Any] = dict(
            is_projection=True, activation=activation, name="c_proj"
        )
        return Linear(cfg, (F, D), ("mlp", "embed"), **how)(hidden)
