"""Causal self-attention: projections, positions, windows, caches; spread over devices.

gpt2/model/gpt.py explains the letters of dimensions.
"""

from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from gpt2.config import GPTConfig
from gpt2.model.layers import Embedding, Linear, Mix, Norm, named_param
from gpt2.ops import Scoring, alibi_slopes, attention, attention_cached, resolve, rotate
from gpt2.parallel.rules import constrain, map_devices
from gpt2.utils.platform import kernels_for, target
from gpt2.utils.scan import by_layer

TINY = 1e-24  # in place of the squared length of a value that is 0


class LayerInputs(struct.PyTreeNode):
    """What every layer reads beside its own input.

    Attributes:
        positions: `[B or 1, T]` int32.
        segments: `[B, T]` int32 or None; positions see only those of their own segment.
        tokens: `[B, T]` int32, for `model.value_embeddings`.
        embedded: `[B, T, D]` in the compute type, the first layer's input, for
            `model.embedding_skip`; else None.
        rotation: cosines and sines for `model.position=rope`, see `gpt2.ops.rotation`; else None.
    """

    positions: jax.Array
    segments: jax.Array | None
    tokens: jax.Array
    embedded: jax.Array | None = None
    rotation: tuple[jax.Array, jax.Array] | None = None


class Attention(nn.Module):
    """Causal self-attention over all heads."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x, cache, layer, inputs, first_values, deterministic):
        """Lets each position attend to itself and those before it.

        Args:
            x: `[B, T, D]` in the compute type.
            cache: None, or keys and values `[B, K, S, H]` of the positions so far.
            layer: its number, from 0 on; in a scan an int32 scalar.
            inputs: `LayerInputs`.
            first_values: as `Stream` has them.
            deterministic: False applies dropout.

        Returns:
            `[B, T, D]` in the compute type, the cache with the new keys and values, and the first
            layer's values.
        """
        cfg = self.config
        D = cfg.embed_dim
        N = cfg.num_heads
        H = cfg.head_size
        positions = inputs.positions
        chex.assert_shape(x, (None, None, D))
        chex.assert_shape(positions, ({1, x.shape[0]}, x.shape[1]))
        chex.assert_type(positions, int)
        q, k, v = self._project(x)
        v, first_values = self._mix_values(v, first_values, layer, inputs.tokens)
        if cfg.qk_norm:
            q = Norm(cfg, "head_size", "rmsnorm", name="q_norm")(q)
            k = Norm(cfg, "head_size", "rmsnorm", name="k_norm")(k)
        if inputs.rotation is not None:
            q, k = (rotate(heads, *inputs.rotation) for heads in (q, k))
        slopes = alibi_slopes(N) if cfg.position == "alibi" else None
        sinks = None
        if cfg.attention_sink:
            sinks = named_param(self, "sinks", nn.initializers.zeros, (N,), ("heads",))
        dropout = 0.0 if deterministic else cfg.dropout
        dropout_key = self.make_rng("dropout") if dropout else None
        if cache is not None:
            cache = jax.tree.map(
                lambda old, new: _write(old, new, positions[:, 0]), cache, (k, v)
            )

        def attend(window: int) -> jax.Array:
            # 8 / H in place of 1 / sqrt(H): equal at GPT-2's own head size of 64 (Yang et al. 2022,
            # section 4; as microsoft/mup).
            scale = 8.0 / H if cfg.mup_base_width else 0.0
            scoring = Scoring(window=window, softcap=cfg.attention_softcap, scale=scale)
            how: dict[str, Any] = dict(scoring=scoring, slopes=slopes, sinks=sinks)
            if cache is not None:
                keys, values = cache
                return attention_cached(q, keys, values, positions[:, -1] + 1, **how)
            how |= dict(
                segments=inputs.segments, dropout=dropout, dropout_key=dropout_key
            )
            return spread_attention(q, k, v, implementation=cfg.attention, **how)

        y = by_layer(attend, cfg.windows, layer)
        if cfg.exclusive_attention:
            y = without_own(y, v)
        if cfg.attention_gate:  # half open at the start, as in the paper
            gate = Linear(cfg, (D, N), ("embed", "heads"), name="c_gate")(x)
            y = (
                y
                * jax.nn.sigmoid(constrain(gate, "batch", "length", "heads"))[..., None]
            )
        y = constrain(y, "batch", "length", "heads", "head_size")
        axes = "heads", "head_size", "embed"
        c_proj = Linear(
            cfg, (N, H, D), axes, num_contract=2, is_projection=True, name="c_proj"
        )
        return c_proj(y), cache, first_values

    def _project(self, x):
        """Returns queries `[B, T, N, H]`, keys and values `[B, T, K, H]`."""
        cfg = self.config
        D = cfg.embed_dim
        N = cfg.num_heads
        K = cfg.kv_heads
        H = cfg.head_size

        def project(name, *shape):
            axes = ("qkv", "heads", "head_size")[-len(shape) :]
            in_parts = len(shape) > 2
            y = Linear(
                cfg, (D, *shape), ("embed", *axes), in_parts=in_parts, name=name
            )(x)
            each = y if in_parts else [y]
            return [
                constrain(part, "batch", "length", "heads", "head_size")
                for part in each
            ]

        if K == N:
            return project("c_attn", 3, N, H)
        return [*project("c_q", N, H), *project("c_kv", 2, K, H)]

    def _mix_values(self, v, first_values, layer, tokens):
        """Mixes other values into this layer's; returns them and the first layer's.

        The first layer mixes its values with themselves, so that all layers are alike.
        """
        cfg = self.config
        if cfg.value_residual:
            first_values = jnp.where(layer == 0, v, first_values)
            v = Mix(cfg, (0.5, 0.5), name="value_residual")(v, first_values)
        if cfg.value_embeddings:
            axes = ("vocab", "table")
            width = cfg.kv_heads * cfg.head_size
            table = Embedding(
                cfg, cfg.vocab_size, axes, cfg.init_std, width, name="value_embedding"
            )
            embedded = table(tokens).reshape(v.shape)
            embedded = constrain(embedded, "batch", "length", "heads", "head_size")
            v = Mix(cfg, (0.5, 0.5), name="value_mix")(v, embedded)
        return v, first_values


def spread_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    implementation: str,
    scoring: Scoring = Scoring(),
    slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """Calls `gpt2.ops.attention` on the devices of the current trace, each with its part."""
    sizes = target().kernels, q.dtype, q.shape[1], q.shape[3]
    given: dict[str, Any] = dict(alibi=slopes is not None, sinks=sinks is not None)
    name = resolve(implementation, *sizes, scoring=scoring, **given)
    heads = "batch", "length", "heads", "head_size"
    others = ("batch", "length"), ("heads",), ("heads",)
    options |= dict(implementation=name, scoring=scoring, slopes=slopes, sinks=sinks)
    options |= dict(map_kernel=lambda kernel: map_devices(kernel, heads, others))
    return attention(q, k, v, **options)


def without_own(y: jax.Array, v: jax.Array) -> jax.Array:
    """Takes from `y` `[B, T, N, H]` its part along each position's own value, `[B, T, K, H]`."""
    own = jnp.repeat(v, y.shape[2] // v.shape[2], axis=2).astype(jnp.float32)
    share = (y * own).sum(-1, keepdims=True) / jnp.maximum(
        (own * own).sum(-1, keepdims=True), TINY
    )
    return (y - share * own).astype(y.dtype)


def _write(cache: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """Writes `new` [B, T, K, H] into `cache` [B, K, S, H] from each row's `start` [B]."""
    return jax.vmap(
        lambda c, n, s: jax.lax.dynamic_update_slice_in_dim(c, n, s, axis=1)
    )(cache, jnp.swapaxes(new, 1, 2), start)


def resolve_attention(cfg: GPTConfig, device: jax.Device) -> str:
    """Returns the implementation of attention that a model takes on a device."""
    scoring = Scoring(window=cfg.window, softcap=cfg.attention_softcap)
    shape = kernels_for(device), cfg.compute_dtype, cfg.context_length, cfg.head_size
    given: dict[str, Any] = dict(
        alibi=cfg.position == "alibi", sinks=cfg.attention_sink
    )
    return resolve(cfg.attention, *shape, scoring=scoring, **given)
