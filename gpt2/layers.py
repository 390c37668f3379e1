"""The layers of GPT-2, from a linear map to a block of attention and MLP.

Letters of dimensions are those of gpt2/model.py.
"""

from collections.abc import Callable
from functools import partial

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from gpt2.config import GPTConfig
from gpt2.ops import attention, gelu_tanh, linear, norm
from gpt2.ops.attention import attention_cached
from gpt2.parallel.rules import constrain


class Linear(nn.Module):
    """A linear map from the last axes of its input to new ones.

    Attributes:
        shape: of the kernel: contracted axes, then new ones.
        axes: the kernel's logical axes.
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
        dtype = self.config.param_dtype
        init = nn.with_logical_partitioning(nn.initializers.normal(self.stddev), self.axes)
        kernel = self.param("kernel", init, self.shape, dtype)
        bias = None
        if self.config.bias:
            out = self.num_contract
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, self.axes[out:])
            bias = self.param("bias", zeros, self.shape[out:], dtype)
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
        cfg = self.config
        ones = nn.with_logical_partitioning(nn.initializers.ones, ("norm",))
        scale = self.param("scale", ones, x.shape[-1:], cfg.param_dtype)
        bias = None
        if cfg.norm == "layernorm" and cfg.bias:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, ("norm",))
            bias = self.param("bias", zeros, x.shape[-1:], cfg.param_dtype)
        return norm(x, scale, bias, center=cfg.norm == "layernorm", dtype=cfg.compute_dtype)


class Embedding(nn.Module):
    """A table of vectors, looked up by integers."""

    config: GPTConfig
    num_rows: int
    axes: tuple[str, str]
    stddev: float

    def setup(self):
        init = nn.with_logical_partitioning(nn.initializers.normal(self.stddev), self.axes)
        shape = (self.num_rows, self.config.embed_dim)
        self.embedding = self.param("embedding", init, shape, self.config.param_dtype)

    def __call__(self, indices: jax.Array) -> jax.Array:
        return jnp.take(self.embedding, indices, axis=0).astype(self.config.compute_dtype)

    def first(self, num_rows: int) -> jax.Array:
        """Returns the first rows, whose gradient needs no scatter."""
        return self.embedding[:num_rows].astype(self.config.compute_dtype)


class Attention(nn.Module):
    """Causal self-attention over all heads."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x, cache, positions, segments, deterministic):
        cfg = self.config
        D, N, H = cfg.embed_dim, cfg.num_heads, cfg.head_size
        qkv = Linear(cfg, (D, 3, N, H), ("embed", "qkv", "heads", "head_size"), name="c_attn")(x)
        qkv = constrain(qkv, "batch", "length", "qkv", "heads", "head_size")
        q, k, v = (x.squeeze(2) for x in jnp.split(qkv, 3, axis=2))  # [B, T, N, H] each
        if cfg.qk_norm:
            q, k = _unit_rms(q), _unit_rms(k)
        if cfg.position == "rope":
            q, k = _rotate(q, positions), _rotate(k, positions)
        if cache is None:
            dropout = 0.0 if deterministic else cfg.dropout
            y = attention(
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
            y = attention_cached(q, *cache, end)
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
    """Two linear maps around a nonlinearity; `swiglu` gates with a third (Shazeer 2020)."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.config
        D, F = cfg.embed_dim, cfg.mlp_dim
        hidden = Linear(cfg, (D, F), ("embed", "mlp"), name="c_fc")(x)
        hidden = constrain(hidden, "batch", "length", "mlp")
        if cfg.activation == "swiglu":
            gate = Linear(cfg, (D, F), ("embed", "mlp"), name="c_gate")(x)
            hidden = nn.silu(gate) * hidden
        c_proj = Linear(
            cfg,
            (F, D),
            ("mlp", "embed"),
            stddev=_residual_stddev(cfg),
            activation=_ACTIVATIONS[cfg.activation],
            name="c_proj",
        )
        return c_proj(hidden)


class Block(nn.Module):
    """One layer: attention and MLP, each a residual branch after a norm.

    Takes and returns `x` [B, T, D] and the layer's `cache` (None, or keys and values
    [B, N, S, H]); `positions` [B or 1, T] int32; `segments` [B, T] int32 or None.
    """

    config: GPTConfig

    @nn.compact
    def __call__(self, x, cache, positions, segments, deterministic):
        cfg = self.config
        chex.assert_shape(x, (None, positions.shape[1], cfg.embed_dim))
        dropout = nn.Dropout(cfg.dropout, deterministic=deterministic)
        with jax.named_scope("attention"):
            y = Norm(cfg, name="ln_1")(x)
            y, cache = Attention(cfg, name="attn")(y, cache, positions, segments, deterministic)
            x = x + dropout(y)
        with jax.named_scope("mlp"):
            x = x + dropout(MLP(cfg, name="mlp")(Norm(cfg, name="ln_2")(x)))
        return constrain(x, "batch", "length", "embed"), cache


def _residual_stddev(config: GPTConfig) -> float:
    """Two branches a layer add to the residual stream: keep its variance (GPT-2, section 2.3)."""
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


_ACTIVATIONS = {
    "gelu_tanh": gelu_tanh,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
    "swiglu": None,
}
