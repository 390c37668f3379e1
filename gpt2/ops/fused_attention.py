"""Attention with library kernels: cuDNN's on GPUs, and Pallas' splash attention on TPUs.

Neither kernel supports dropout. cuDNN needs an even number of positions, and supports no change of
the scores (`plain.ScoreTerm`). Splash needs a number of positions that is a multiple of 128, and
supports one change of the scores, a constant soft cap. If a kernel does not support a call, the
functions below call the reference implementation (`plain.attention`) instead. cuDNN takes 8.8 ms of
a 124M step of 63 ms on an H200; with scores stored in memory, the step would move 122 GB instead of
33 GB.
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
    """Compute causal attention, as `plain.attention` does, with cuDNN's kernel for GPUs.

    `q` and the result are `[B, T, N, H]`, and `k` and `v` are `[B, T, K, H]`. The reference
    implementation runs instead if there is dropout, if `scoring` changes the scores (for example by
    a soft cap), or if T is odd. `spread` is given if devices split the heads: it wraps a kernel so
    that each device runs the kernel on the device's own heads, because XLA's partitioner cannot
    split cuDNN's kernel.
    """
    is_odd = q.shape[1] % 2 == 1  # cuDNN has no derivative for odd lengths
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
    # There is no `checkpoint_name` here, because JAX names this output itself. With two names, a
    # remat policy would store the output twice.
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
    """Compute causal attention, as `plain.attention` does, with the splash kernel for TPUs.

    `q` and the result are `[B, T, N, H]`, and `k` and `v` are `[B, T, K, H]`. The reference
    implementation runs instead if there is dropout, if `scoring` changes the scores by anything but
    one constant soft cap, or if T is not a multiple of 128. With `interpret`, Pallas' interpreter
    runs the kernel, so that tests can run on CPUs. `spread` is given if devices split the heads: it
    wraps a kernel so that each device runs the kernel on the device's own heads.
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
    """Apply splash attention to queries, keys and values `[B, T, N, H]`.

    The kernel takes queries, keys and values `[N, T, H]` of one sequence. It does not scale scores,
    so the queries are multiplied by the scale.
    """
    # This import is here because it is slow, and only TPUs need it.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    T, N, _ = q.shape[1:]
    block = max(size for size in (128, 256, 512) if T % size == 0)
    sizes = dict[str, Any]()
    for field in dataclasses.fields(splash.BlockSizes):
        if field.name.startswith("block_"):
            sizes[field.name] = block
    # The last axis fills the 128 lanes of a TPU. Heads of 64 dimensions would leave half of the
    # lanes empty. Positions are therefore the last axis of keys and values, which saves 2 % of a
    # step on a v5e.
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
