"""Attention with tokamax's kernel (Pallas, Mosaic) on Hopper and Blackwell GPUs, with a soft cap.

cuDNN has no soft cap, and the reference implementation stores its scores. Compiled for an H100, a
124M step of 8 sequences with a soft cap needs 13.1 GiB with the reference implementation, and
6.2 GiB with this kernel. No GPU has run the kernel in this project yet.
"""

import importlib.util

from jax import Array
from jax.ad_checkpoint import checkpoint_name

from gpt2.ops.fused_attention import library_options
from gpt2.ops.plain import Scoring
from gpt2.utils.remat import CORE_ATTENTION


def is_installed() -> bool:
    """Return whether the package tokamax is installed."""
    return importlib.util.find_spec("tokamax") is not None


def tokamax_attention(
    q: Array, k: Array, v: Array, segments: Array | None, scoring: Scoring
) -> Array:
    """Compute causal attention, as `plain.attention` does, with tokamax's kernel for GPUs.

    `q` and the result are `[B, T, N, H]`, and `k` and `v` are `[B, T, K, H]`.
    """
    # This import is here because it takes seconds, and the package is optional.
    import tokamax

    out = tokamax.dot_product_attention(
        q,
        k,
        v,
        **library_options(segments, scoring),
        logits_soft_cap=scoring.softcap or None,
        implementation="mosaic",
    )
    return checkpoint_name(out, CORE_ATTENTION)
