"""Attention with library kernels: cuDNN's on GPUs, and Pallas' splash attention on TPUs.

Neither kernel supports dropout. cuDNN needs an even number of positions, and supports no change of
the scores (`plain.ScoreTerm`). Splash needs a number of positions that is a multiple of 128, and
supports one change of the scores, a constant soft cap. `get_attention` in
gpt2/parallel/kernels.py replaces a kernel with the reference implementation where the kernel does
not support a call. cuDNN takes 8.8 ms of a 124M step of 63 ms on an H200; with scores stored in
memory, the step would move 122 GB instead of 33 GB.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from gpt2.ops.plain import Scoring
from gpt2.utils.remat import CORE_ATTENTION


def cudnn_attention(
    q: Array, k: Array, v: Array, segments: Array | None, scoring: Scoring
) -> Array:
    """Compute causal attention, as `plain.attention` does, with cuDNN's kernel for GPUs.

    `q` and the result are `[B, T, N, H]`, and `k` and `v` are `[B, T, K, H]`.
    """
    # There is no `checkpoint_name` here, because JAX names this output itself. With two names, a
    # remat policy would store the output twice.
    return jax.nn.dot_product_attention(
        q, k, v, **library_options(segments, scoring), implementation="cudnn"
    )


def library_options(segments: Array | None, scoring: Scoring) -> dict[str, Any]:
    """Return the keyword arguments that cuDNN's and tokamax's attention have in common."""
    mask = None
    if segments is not None:
        mask = segments[:, None, :, None] == segments[:, None, None, :]
    return {
        "mask": mask,
        "scale": scoring.scale,
        "is_causal": True,
        "local_window_size": (scoring.window - 1, 0) if scoring.window else None,
    }


def splash_attention(
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    scoring: Scoring,
    *,
    interpret: bool,
) -> Array:
    """Compute causal attention, as `plain.attention` does, with the splash kernel for TPUs.

    `q` and the result are `[B, T, N, H]`, and `k` and `v` are `[B, T, K, H]`. The kernel takes
    `[N, T, H]` of one sequence. It does not scale scores, so the queries are multiplied by the
    scale. With `interpret`, Pallas' interpreter runs the kernel, so that tests can run on CPUs.
    """
    # This import is here because it is slow, and only TPUs need it.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    group = q.shape[2] // k.shape[2]
    k = jnp.repeat(k, group, axis=2)
    v = jnp.repeat(v, group, axis=2)
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
