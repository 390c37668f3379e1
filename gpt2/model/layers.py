"""The layers of GPT-2, from a linear map to a block of attention and MLP.

gpt2/model/gpt.py explains the letters of dimensions.
"""

from collections.abc import Callable

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from gpt2.config import GPTConfig
from gpt2.ops import ACTIVATIONS, GATES, attention, attention_cached, linear, norm, resolve
from gpt2.parallel.rules import constrain, is_spread, map_devices, platform


class Linear(nn.Module):
    """A linear map from the last axes of its input to new ones.

    Attributes:
        config: gives the types, and whether there is a bias.
        shape: of the kernel: contracted axes, then new ones.
        axes: names of the kernel's axes.
        num_contract: how many axes are contracted.
        stddev: of the kernel's normal initialisation.
        activation: applied to the input first, elementwise.
    """

    config: GPTConfig
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    num_contract: int = 1
    stddev: float = 0.02
    activation: Callable[[jax.Array], jax.Array] | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[..., C1, .., Cn]` to `[..., O1, .., Om]` in the compute type."""
        dtype = self.config.param_dtype
        init = nn.with_logical_partitioning(nn.initializers.normal(self.stddev), self.axes)
        kernel = self.param("kernel", init, self.shape, dtype, unbox=True)
        bias = None
        if self.config.bias:
            out = self.num_contract
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, self.axes[out:])
            bias = self.param("bias", zeros, self.shape[out:], dtype, unbox=True)
        return linear(
            x,
            kernel,
            bias,
            num_contract=self.num_contract,
            activation=self.activation,
            dtype=self.config.compute_dtype,
        )


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019); statistics in float32."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis of `x` `[..., D]`; returns it in the compute type."""
        cfg = self.config
        chex.assert_axis_dimension(x, -1, cfg.embed_dim)
        ones = nn.with_logical_partitioning(nn.initializers.ones, ("norm",))
        scale = self.param("scale", ones, x.shape[-1:], cfg.param_dtype, unbox=True)
        bias = None
        if cfg.norm == "layernorm" and cfg.bias:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, ("norm",))
            bias = self.param("bias", zeros, x.shape[-1:], cfg.param_dtype, unbox=True)
        return norm(x, scale, bias, center=cfg.norm == "layernorm", dtype=cfg.compute_dtype)


class Embedding(nn.Module):
    """A table of vectors, looked up by integers.

    Attributes:
        config: gives the width of a vector, and the types.
        num_rows: how many vectors there are.
        axes: names of the table's axes.
        stddev: of the table's normal initialisation.
    """

    config: GPTConfig
    num_rows: int
    axes: tuple[str, str]
    stddev: float

    def setup(self):
        """Creates the table, `[num_rows, D]`."""
        init = nn.with_logical_partitioning(nn.initializers.normal(self.stddev), self.axes)
        shape = (self.num_rows, self.config.embed_dim)
        dtype = self.config.param_dtype
        self.embedding: jax.Array = self.param("embedding", init, shape, dtype, unbox=True)

    def __call__(self, indices: jax.Array) -> jax.Array:
        """Returns the rows of `indices` [B, T], int32, as [B, T, D] in the compute type."""
        return jnp.take(self.embedding, indices, axis=0).astype(self.config.compute_dtype)

    def first(self, num_rows: int) -> jax.Array:
        """Returns the first rows, [num_rows, D] in the compute type.

        Their gradient needs no scatter, unlike that of `__call__`.
        """
        chex.assert_axis_dimension_gteq(self.embedding, 0, num_rows)
        return self.embedding[:num_rows].astype(self.config.compute_dtype)


class Attention(nn.Module):
    """Causal self-attention over all heads."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x, cache, positions, segments, deterministic):
        """Lets each position attend to itself and those before it.

        Args:
            x: `[B, T, D]` in the compute type.
            cache: None, or keys and values `[B, N, S, H]` of the positions so far.
            positions: `[B or 1, T]` int32.
            segments: `[B, T]` int32 or None; positions see only those of their own segment.
            deterministic: False applies dropout.

        Returns:
            `[B, T, D]` in the compute type, and the cache with the new keys and values.
        """
        cfg = self.config
        D, N, H = cfg.embed_dim, cfg.num_heads, cfg.head_size
        chex.assert_shape(x, (None, None, D))
        chex.assert_shape(positions, ({1, x.shape[0]}, x.shape[1]))
        chex.assert_type(positions, int)
        qkv = Linear(cfg, (D, 3, N, H), ("embed", "qkv", "heads", "head_size"), name="c_attn")(x)
        qkv = constrain(qkv, "batch", "length", "qkv", "heads", "head_size")
        q, k, v = (x.squeeze(2) for x in jnp.split(qkv, 3, axis=2))  # [B, T, N, H] each
        if cfg.qk_norm:
            q, k = _unit_rms(q), _unit_rms(k)
        if cfg.position == "rope":
            q, k = _rotate(q, positions), _rotate(k, positions)
        if cache is None:
            dropout = 0.0 if deterministic else cfg.dropout
            y = spread_attention(
                q,
                k,
                v,
                implementation=cfg.attention,
                segments=segments,
                dropout=dropout,
                dropout_key=self.make_rng("dropout") if dropout else None,
            )
        else:
            start, end = positions[:, 0], positions[:, -1] + 1
            cache = jax.tree.map(lambda old, new: _write(old, new, start), cache, (k, v))
            k_cache, v_cache = cache
            y = attention_cached(q, k_cache, v_cache, end)
        y = constrain(y, "batch", "length", "heads", "head_size")
        c_proj = Linear(
            cfg,
            (N, H, D),
            ("heads", "head_size", "embed"),
            num_contract=2,
            stddev=_residual_stddev(cfg),
            name="c_proj",
        )
        return c_proj(y), cache


class MLP(nn.Module):
    """Two linear maps around an activation; gated forms have a third (Shazeer 2020)."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `x` `[B, T, D]` to `[B, T, D]` in the compute type."""
        cfg = self.config
        D, F = cfg.embed_dim, cfg.mlp_dim
        chex.assert_shape(x, (None, None, D))
        hidden = Linear(cfg, (D, F), ("embed", "mlp"), name="c_fc")(x)
        hidden = constrain(hidden, "batch", "length", "mlp")
        if cfg.is_gated:
            gate = Linear(cfg, (D, F), ("embed", "mlp"), name="c_gate")(x)
            hidden = GATES[cfg.activation](gate) * hidden
        c_proj = Linear(
            cfg,
            (F, D),
            ("mlp", "embed"),
            stddev=_residual_stddev(cfg),
            activation=None if cfg.is_gated else ACTIVATIONS[cfg.activation],
            name="c_proj",
        )
        return c_proj(hidden)


class Block(nn.Module):
    """One layer: attention and MLP, each a residual branch after a norm."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x, cache, positions, segments, deterministic):
        """Returns `x` `[B, T, D]` in the compute type after the layer, and its cache.

        Arguments are those of `Attention`.
        """
        cfg = self.config
        chex.assert_rank(positions, 2)
        chex.assert_shape(x, (None, positions.shape[1], cfg.embed_dim))
        dropout = nn.Dropout(cfg.dropout, deterministic=deterministic)
        with jax.named_scope("attention"):
            y = Norm(cfg, name="ln_1")(x)
            y, cache = Attention(cfg, name="attn")(y, cache, positions, segments, deterministic)
            x = x + dropout(y)
        with jax.named_scope("mlp"):
            x = x + dropout(MLP(cfg, name="mlp")(Norm(cfg, name="ln_2")(x)))
        return constrain(x, "batch", "length", "embed"), cache


def spread_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    implementation: str,
    segments: jax.Array | None = None,
    dropout: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Calls `gpt2.ops.attention` on the devices of the current trace, each with its part.

    Args:
        q, k, v, segments, dropout, dropout_key: as for `gpt2.ops.attention`.
        implementation: one of `model.attention`; 'auto' selects what suits the platform.

    Returns:
        `[B, T, N, H]` of the type of `q`.

    Raises:
        UserError: the implementation cannot run on the platform.
    """
    chex.assert_rank(q, 4)
    name = resolve(implementation, platform(), q.dtype, q.shape[1], q.shape[3])
    heads, rows = ("batch", "length", "heads", "head_size"), ("batch", "length")

    def map_kernel(kernel: Callable) -> Callable:
        if name == "blocked" and not is_spread("heads"):
            # XLA can split the batch of this one. `map_devices` would compute it again in the
            # backward pass.
            return kernel
        return map_devices(kernel, heads, rows)

    return attention(
        q,
        k,
        v,
        implementation=name,
        segments=segments,
        dropout=dropout,
        dropout_key=dropout_key,
        interpret=platform() != "tpu",
        map_kernel=map_kernel,
    )


def _residual_stddev(config: GPTConfig) -> float:
    """Returns the stddev of a branch's last kernel (GPT-2, section 2.3).

    Two branches in each layer add to the residual stream. This keeps its variance.
    """
    return 0.02 / (2 * config.num_layers) ** 0.5


def _unit_rms(x: jax.Array) -> jax.Array:
    """Scales each head's vector [..., H] to unit root mean square (Dehghani et al. 2023)."""
    square = jnp.square(x.astype(jnp.float32)).mean(axis=-1, keepdims=True)
    return (x * jax.lax.rsqrt(square + 1e-5)).astype(x.dtype)


def _rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary position embedding of `x` [B, T, N, H] (Su et al. 2021), halves as in GPT-NeoX."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-jnp.arange(half) / half)
    angles = positions[:, :, None, None] * frequencies
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def _write(cache: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """Writes `new` [B, T, N, H] into `cache` [B, N, S, H] from each row's `start` [B]."""
    return jax.vmap(lambda c, n, s: jax.lax.dynamic_update_slice_in_dim(c, n, s, axis=1))(
        cache, jnp.swapaxes(new, 1, 2), start
    )
