"""Attention with tokamax's kernel (Pallas, Mosaic) on Hopper and Blackwell GPUs, with a soft cap.

cuDNN has no soft cap, and the reference implementation stores its scores. Compiled for an H100, a
124M step of 8 sequences with a soft cap needs 13.1 GiB with the reference implementation, and
6.2 GiB with this kernel. No GPU has run the kernel in this project yet.
"""

import importlib.util
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from gpt2.ops import plain
from gpt2.ops.plain import Scoring
from gpt2.ops.table import Spread
from gpt2.utils.remat import CORE_ATTENTION


def is_installed() -> bool:
    """Return whether the package tokamax is installed."""
    return importlib.util.find_spec("tokamax") is not None


def tokamax_attention(
    q: Array, k: Array, v: Array, scoring: Scoring, *, spread: Spread | None = None
) -> Array:
    """Compute causal attention, as `plain.attention` does, with tokamax's kernel for GPUs.

    `q` and the result are `[B, T, N, H]`, and `k` and `v` are `[B, T, K, H]`. The reference
    implementation runs instead if the dtype is not bfloat16, if there is dropout, or if `scoring`
    changes the scores by anything but one constant soft cap. `spread` is given if devices split the
    heads: it wraps a kernel so that each device runs the kernel on the device's own heads.
    """
    # With a soft cap of at most 60, tokamax does not subtract the largest score from the scores.
    # Their exponentials would then overflow in float16, so only bfloat16 is used.
    is_narrow = q.dtype != jnp.bfloat16
    if scoring.softcap is None or scoring.dropout or is_narrow:
        return plain.attention(q, k, v, scoring)
    kernel: Callable = partial(_mosaic, scoring=scoring)
    if spread:
        kernel = spread(kernel)
    return kernel(q, k, v, scoring.segments)


def _mosaic(q, k, v, segments, scoring):
    # This import is here because it takes seconds, and the package is optional.
    import tokamax

    mask = None
    if segments is not None:
        mask = segments[:, None, :, None] == segments[:, None, None, :]
    out = tokamax.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        scale=scoring.scale,
        is_causal=True,
        local_window_size=(scoring.window - 1, 0) if scoring.window else None,
        logits_soft_cap=scoring.softcap or None,
        implementation="mosaic",
    )
    return checkpoint_name(out, CORE_ATTENTION)
