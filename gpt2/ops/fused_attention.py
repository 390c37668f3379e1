"""Attention by kernels of libraries: cuDNN's, and Pallas' splash attention.

Each computes `plain.attention` without dropout and terms, splash with a soft cap; what one cannot
do, the formula does. cuDNN takes 8.8 of 63 ms of a step of 124M on an H200; with scores in memory
the step moves 122 GB in place of 33. Splash is 1.7 times as fast as scores in memory.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from gpt2.ops import plain
from gpt2.ops.plain import Scoring
from gpt2.ops.table import Spread
from gpt2.utils.remat import CORE_ATTENTION


def cudnn_attention(
    q: Array, k: Array, v: Array, scoring: Scoring, *, spread: Spread | None = None
) -> Array:
    """Computes `plain.attention` on GPUs, of an even number of positions.

    `spread` makes a function run on each device's heads: XLA does not split it.
    """
    is_odd = q.shape[1] % 2 == 1  # for which cuDNN has no derivative
    if scoring.terms or scoring.dropout or is_odd:
        return plain.attention(q, k, v, scoring)
    kernel: Callable = partial(_cudnn, scoring=scoring)
    if spread:
        kernel = spread(kernel)
    return kernel(q, k, v, scoring.segments)


def _cudnn(q, k, v, segments, scoring):
    mask = None
    if segments is not None:
        mask = segments[:, None, :, None] == segments[:, None, None, :]
    # It has a name of its own for rematerialisation; with two, the output would be kept twice.
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        scale=scoring.scale,
        is_causal=True,
        local_window_size=(scoring.window - 1, 0) if scoring.window else None,
        implementation="cudnn",
    )


def splash_attention(
    q: Array,
    k: Array,
    v: Array,
    scoring: Scoring,
    *,
    interpret: bool,
    spread: Spread | None = None,
) -> Array:
    """Computes `plain.attention` on TPUs, of positions in steps of 128.

    `interpret` runs the kernel on other devices, for tests.
    """
    if scoring.softcap is None or scoring.dropout or q.shape[1] % 128:
        return plain.attention(q, k, v, scoring)
    group = q.shape[2] // k.shape[2]
    k = jnp.repeat(k, group, axis=2)
    v = jnp.repeat(v, group, axis=2)
    kernel: Callable = partial(_splash, scoring=scoring, interpret=interpret)
    if spread:
        kernel = spread(kernel)
    return kernel(q, k, v, scoring.segments)


def _splash(q, k, v, segments, scoring, interpret):
    """Splash attention takes one example, heads first, and leaves the scale to its caller."""
    # It takes a while to import.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    T, N, _ = q.shape[1:]
    block = max(size for size in (128, 256, 512) if T % size == 0)
    sizes = dict[str, Any]()
    for field in dataclasses.fields(splash.BlockSizes):
        if field.name.startswith("block_"):
            sizes[field.name] = block
    # Positions fill the lanes of a TPU, of which heads of 64 would leave half empty (v5e 2 %).
    sizes["k_layout"] = sizes["v_layout"] = splash.QKVLayout.SEQ_MINOR
    mask: splash.Mask = splash.CausalMask((T, T))
    if scoring.window:
        before = scoring.window - 1
        mask = splash.LocalMask((T, T), (before, 0), offset=0)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * N),
        block_sizes=dataclasses.replace(splash.BlockSizes.get_default(), **sizes),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=scoring.softcap or None,
        interpret=interpret,
        residual_checkpoint_name=CORE_ATTENTION,
    )
    ids = None if segments is None else splash.SegmentIds(segments, segments)
    q = jnp.swapaxes(q * scoring.scale, 1, 2)
    k = jnp.swapaxes(k, 1, 2)
    v = jnp.swapaxes(v, 1, 2)
    out = jax.vmap(kernel)(q, k, v, ids)
    return jnp.swapaxes(out, 1, 2)
