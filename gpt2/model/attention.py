"""Causal self-attention: projections, rotary positions, scores, and the cache of keys and values.

gpt2/model/gpt.py explains the dimension letters.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from gpt2.config import GPTConfig
from gpt2.model.ingredients import ingredients_of
from gpt2.model.layers import Linear, Norm
from gpt2.model.seams import Context, Heads
from gpt2.ops import Ops, Scoring
from gpt2.ops.plain import (
    ScoreTerm,
    SoftCap,
    attention_cached,
    rope,
    rope_frequencies,
    rotation,
)
from gpt2.utils.trees import Tree


class Attention(nn.Module):
    """Causal self-attention: each position attends to itself and the positions before it.

    In cached decoding, the collection `cache` holds the keys and values of earlier positions, as
    gpt2/model/cache.py describes.
    """

    config: GPTConfig
    ops: Ops

    @nn.compact
    def __call__(self, x: Array, context: Context) -> Array:
        """Return attention's output `[B, T, D]` for the input `x` `[B, T, D]`, in compute dtype.

        `context` holds the positions, the segments and the index of the layer.
        """
        cfg, ops = self.config, self.ops
        D, N, H = cfg.embed_dim, cfg.num_heads, cfg.head_size
        chex.assert_shape(x, (None, None, D))
        chex.assert_shape(context.positions, ({1, x.shape[0]}, x.shape[1]))
        context = context.replace(attention_input=x)

        q, k, v = self._project(x)
        if cfg.qk_norm:  # Dehghani et al. 2023, arXiv 2302.05442
            norm = partial(Norm, cfg, ops, kind="rmsnorm", axis="head_size")
            q = norm(name="q_norm")(q)
            k = norm(name="k_norm")(k)
        if context.rotation is not None:
            q = rope(q, *context.rotation)
            k = rope(k, *context.rotation)
        heads = Heads(q, k, v)
        for ingredient in ingredients_of(cfg):
            heads = ingredient.heads(self, heads, context)
        # Check shapes, because an axis of size 1 would broadcast silently.
        chex.assert_shape(heads.q, (*x.shape[:2], N, H))
        chex.assert_shape(heads[1:], (*x.shape[:2], cfg.kv_heads, H))
        chex.assert_trees_all_equal_dtypes(*heads)

        y = self._attend(heads, context)
        context = context.replace(heads=heads)
        for ingredient in ingredients_of(cfg):
            y = ingredient.attention_output(self, y, context)
        y = ops.constrain(y, "batch", "length", "heads", "head_size")
        shape = (N, H, D)
        axes = ("heads", "head_size", "embed")
        project = Linear(
            cfg, ops, shape, axes, num_contract=2, adds_to_residual=True, name="c_proj"
        )
        return project(y)

    def _project(self, x: Array) -> list[Array]:
        """Return a list: queries `[B, T, N, H]`, keys `[B, T, K, H]`, values `[B, T, K, H]`."""
        cfg, ops = self.config, self.ops
        D, N, K, H = cfg.embed_dim, cfg.num_heads, cfg.kv_heads, cfg.head_size
        axes = ("embed", "qkv", "heads", "head_size")
        if K == N:
            heads = Linear(cfg, ops, (D, 3, N, H), axes, name="c_attn").parts(x)
        else:
            query_axes = ("embed", "heads", "head_size")
            q = Linear(cfg, ops, (D, N, H), query_axes, name="c_q")(x)
            kv = Linear(cfg, ops, (D, 2, K, H), axes, name="c_kv")
            heads = [q, *kv.parts(x)]
        return [
            ops.constrain(y, "batch", "length", "heads", "head_size") for y in heads
        ]

    def _attend(self, heads: Heads, context: Context) -> Array:
        """Return `[B, T, N, H]`: the values, weighted by the softmax of the scores and summed."""
        cfg = self.config
        q, k, v = heads
        # Under muP, products of queries and keys grow with H, not with its square root (Yang et al.
        # 2022, section 4). At a head size of 64, the two scales below are equal.
        scale = 8.0 / cfg.head_size if cfg.mup_base_width else cfg.head_size**-0.5
        terms: tuple[ScoreTerm, ...] = ()
        if cfg.attention_softcap:
            terms = (SoftCap(cfg.attention_softcap),)
        for ingredient in ingredients_of(cfg):
            terms = ingredient.score_terms(self, terms, context)
        scoring = Scoring(scale, terms=terms, segments=context.segments)
        if cfg.dropout and not context.deterministic:
            key = self.make_rng("dropout")
            scoring = scoring._replace(dropout=cfg.dropout, dropout_key=key)
        attention = self.ops.attention
        if self.has_variable("cache", "keys"):
            k, v = self._extend_cache(k, v, context.positions[:, 0])
            attention = partial(attention_cached, length=context.positions[:, -1] + 1)

        def attend(window: int) -> Array:
            return attention(q, k, v, scoring._replace(window=window))

        return _for_layer(attend, cfg.windows, context.layer)

    def _extend_cache(self, k: Array, v: Array, start: Array) -> tuple[Array, Array]:
        """Write keys and values `[B, T, K, H]` to the cache, from position `start` `[B]` on.

        Return all keys and values of the cache, both `[B, K, S, H]`, where S is the cache's length.
        """

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


def _for_layer(function: Callable, values: Sequence, layer: int | Array) -> Tree:
    """Return `function(values[layer])`. `values` holds one Python value for each layer.

    In a scan over layers, `layer` is a traced array, which cannot index a Python sequence. Each
    distinct value therefore becomes a branch of `jax.lax.switch`.
    """
    if isinstance(layer, int):
        return function(values[layer])
    different = sorted(set(values))
    branch = jnp.array([different.index(value) for value in values])[layer]
    return jax.lax.switch(branch, [partial(function, value) for value in different])


def rope_rotation(cfg: GPTConfig, positions: Array) -> tuple[Array, Array]:
    """Return the cosines and sines that `plain.rope` reads, for positions `[B or 1, T]` int32.

    Both are `[B or 1, T, 1, R / 2]` float32, where R is the number of rotated dimensions of a head.
    With `model.rope_scaling`, low frequencies, which complete few turns in `model.rope_context`
    tokens, are divided by `model.rope_factor`. High frequencies do not change. Frequencies between
    low and high ones are divided by a smaller number.
    """
    frequencies = rope_frequencies(cfg.rope_size, cfg.rope_base)
    length = 1.0
    if cfg.rope_scaling != "none":
        kept = _kept_fraction(cfg, frequencies)
        frequencies = kept * frequencies + (1 - kept) * frequencies / cfg.rope_factor
    if cfg.rope_scaling == "yarn":
        # YaRN makes queries and keys larger, so that the softmax over a longer context is as sharp
        # as it was over the original context.
        length = 0.1 * math.log(cfg.rope_factor) + 1
    return rotation(positions, frequencies, length)


def _kept_fraction(cfg: GPTConfig, frequencies: Array) -> Array:
    """Return the fraction of each frequency that is not divided by `model.rope_factor`.

    A frequency f becomes `fraction * f + (1 - fraction) * f / model.rope_factor`. The fraction
    depends on `model.rope_scaling`, and rises from 0 to 1 with the number of turns that a frequency
    completes in `model.rope_context` tokens. `frequencies` and the result are `[R / 2]`, where R is
    the number of rotated dimensions of a head.
    """
    half = len(frequencies)
    context = cfg.rope_context
    # Llama 3, arXiv 2407.21783: the fraction is 0 at 1 turn and 1 at 4 turns, as in Meta's code.
    if cfg.rope_scaling == "llama3":
        fraction = (context * frequencies / (2 * math.pi) - 1) / (4 - 1)
        return jnp.clip(fraction, 0, 1)
    # YaRN, arXiv 2309.00071: the fraction is 1 at 32 turns and 0 at 1 turn. Between them it is
    # linear in the dimension, as in the authors' code.
    many = half * math.log(context / (2 * math.pi * 32), cfg.rope_base)
    one = half * math.log(context / (2 * math.pi), cfg.rope_base)
    first = max(math.floor(many), 0)
    last = min(math.ceil(one), 2 * half - 1)
    fraction = 1 - (jnp.arange(half) - first) / max(last - first, 0.001)
    return jnp.clip(fraction, 0, 1)
