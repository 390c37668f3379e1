"""Causal self-attention: projections, positions, caches.

gpt2/model/gpt.py explains the letters of dimensions.
"""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from gpt2.config import GPTConfig
from gpt2.model.ingredients import Flow, Heads, ingredients_of
from gpt2.model.layers import Linear
from gpt2.ops import Ops, Scoring
from gpt2.ops.plain import ScoreTerm, attention_cached, rope
from gpt2.utils.scan import for_layer


class Attention(nn.Module):
    """Causal self-attention over all heads: each position sees itself and those before it.

    It maps `[B, T, D]` to `[B, T, D]` in the compute type. A collection `cache` holds what these
    positions see beside themselves (gpt2/model/cache.py).
    """

    config: GPTConfig
    ops: Ops

    @nn.compact
    def __call__(self, x: Array, flow: Flow) -> Array:
        """Lets positions attend."""
        cfg, ops = self.config, self.ops
        D, N, H = cfg.embed_dim, cfg.num_heads, cfg.head_size
        chex.assert_shape(x, (None, None, D))
        chex.assert_shape(flow.positions, ({1, x.shape[0]}, x.shape[1]))
        extras = ingredients_of(cfg)

        heads = self._project(x)
        for extra in extras:
            heads = extra.heads(self, heads, flow)
        q, k, v = heads
        chex.assert_shape(q, (*x.shape[:2], N, H))  # fewer would broadcast
        chex.assert_shape([k, v], (*x.shape[:2], cfg.kv_heads, H))
        chex.assert_trees_all_equal_dtypes(q, k, v)
        if flow.rotation is not None:
            q = rope(q, *flow.rotation)
            k = rope(k, *flow.rotation)

        scale = H**-0.5
        terms: tuple[ScoreTerm, ...] = ()
        for extra in extras:
            scale = extra.scale(scale)
            terms += extra.score_terms(self)
        scoring = Scoring(scale, terms=terms, segments=flow.segments)
        if cfg.dropout and not flow.deterministic:
            key = self.make_rng("dropout")
            scoring = scoring._replace(dropout=cfg.dropout, dropout_key=key)
        is_cached = self.has_variable("cache", "keys")
        if is_cached:
            k, v = self._extend_cache(k, v, flow.positions[:, 0])

        def attend(window: int) -> Array:
            how = scoring._replace(window=window)
            if is_cached:
                return attention_cached(q, k, v, flow.positions[:, -1] + 1, how)
            return ops.attention(q, k, v, how)

        if isinstance(flow.layer, int):
            y = attend(cfg.windows[flow.layer])
        else:
            y = for_layer(attend, cfg.windows, flow.layer)
        for extra in extras:
            y = extra.attended(self, y, x, heads)
        y = ops.constrain(y, "batch", "length", "heads", "head_size")
        axes = ("heads", "head_size", "embed")
        project = Linear(
            cfg, ops, (N, H, D), axes, 2, is_projection=True, name="c_proj"
        )
        return project(y)

    def _project(self, x: Array) -> Heads:
        cfg = self.config
        ops = self.ops
        D, N, K, H = cfg.embed_dim, cfg.num_heads, cfg.kv_heads, cfg.head_size
        axes = ("embed", "qkv", "heads", "head_size")
        if K == N:
            c_attn = Linear(cfg, ops, (D, 3, N, H), axes, name="c_attn")
            q, k, v = c_attn.parts(x)
        else:
            of_one = ("embed", "heads", "head_size")
            c_q = Linear(cfg, ops, (D, N, H), of_one, name="c_q")
            c_kv = Linear(cfg, ops, (D, 2, K, H), axes, name="c_kv")
            q = c_q(x)
            k, v = c_kv.parts(x)

        def spread(y: Array) -> Array:
            return ops.constrain(y, "batch", "length", "heads", "head_size")

        return Heads(spread(q), spread(k), spread(v))

    def _extend_cache(self, k: Array, v: Array, start: Array) -> tuple[Array, Array]:
        """Writes keys and values `[B, T, K, H]` from each row's `start` `[B]` on; returns all."""

        def write(old: Array, x: Array, first: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(
                old, jnp.swapaxes(x, 0, 1), first, axis=1
            )

        write_rows = jax.vmap(write)
        keys = write_rows(self.get_variable("cache", "keys"), k, start)
        values = write_rows(self.get_variable("cache", "values"), v, start)
        self.put_variable("cache", "keys", keys)
        self.put_variable("cache", "values", values)
        return keys, values
