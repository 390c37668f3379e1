"""Attention with a linear bias of the scores (ALiBi), by kernels that do not support biases.

The bias `slope * (key - query)` is added to a score, where `key` and `query` are positions, and
each head has its own slope. Softmax does not change if the same number is added to all scores of a
query, so `slope * key` can be added instead. A kernel adds this product as a part of its dot
product of queries and keys: additional dimensions of the queries contain the slope of the head, and
additional dimensions of the keys contain the position. Compiled for an H100 (JAX 0.12.0), a step of
124M with ALiBi and 8 x 1024 tokens in bfloat16 moves 38.6 GB with cuDNN, and 87.0 GB with the
reference implementation.
"""

import jax
import jax.numpy as jnp
from jax import Array

from gpt2.ops.plain import Scoring
from gpt2.ops.table import AttentionFn

MAX_HEAD_SIZE = 128  # of the kernels of cuDNN and tokamax
DIMENSIONS = 8  # head sizes must be multiples of 8; six of the dimensions are not 0
_LOW = 256  # bfloat16 represents all integers up to 256
# 16-bit numbers represent every multiple of 256 below this number exactly.
MAX_LENGTH = 2**16
_PARTS = 3  # the sum of three bfloat16 numbers is as precise as float32


def with_linear_bias(
    kernel: AttentionFn, *, scales_queries: bool = False
) -> AttentionFn:
    """Wrap `kernel`, an attention function that does not support biases, so that it supports one.

    If a `LinearBias` is the only change of the scores, and if there is no dropout, the kernel gets
    queries, keys and values whose head size is larger by `DIMENSIONS`, and no bias. In all other
    cases, the kernel gets the unchanged arguments. The result always has the original head size.
    `scales_queries` states that the kernel multiplies the queries by the scale, in their own dtype.
    """

    def attention(q: Array, k: Array, v: Array, scoring: Scoring) -> Array:
        slopes = scoring.slopes
        if slopes is None or scoring.dropout:
            return kernel(q, k, v, scoring)
        H = q.shape[-1]
        if scales_queries:
            # The kernel would also scale the slopes, and round them.
            q = q * scoring.scale
            scoring = scoring._replace(scale=1.0)
        heads, positions = _factors(slopes / scoring.scale, q.shape[1], q.dtype)
        q = _append(q, heads)
        k = _append(k, positions[:, None])
        v = _append(v, jnp.zeros(DIMENSIONS, v.dtype))
        return kernel(q, k, v, scoring._replace(terms=()))[..., :H]

    return attention


def _factors(slopes: Array, length: int, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Return arrays `[N, DIMENSIONS]` and `[T, DIMENSIONS]`, with T = `length`, in `dtype`.

    The dot product of row n of the first array and row t of the second is `slopes[n] * t`. 16 bits
    cannot represent most slopes and positions. A slope is therefore represented by the sum of three
    numbers, and a position by the sum of two.
    """
    numbers = jnp.finfo(dtype)
    positions = jnp.arange(length)
    low = positions % _LOW
    left = []
    right = []
    for _ in range(_PARTS):
        # A cast to 16 bits and back would not round, because XLA may keep the precision.
        part = jax.lax.reduce_precision(slopes, numbers.nexp, numbers.nmant)
        slopes = slopes - part
        left += [part, part]
        right += [positions - low, low]
    padding = ((0, 0), (0, DIMENSIONS - len(left)))
    heads = jnp.pad(jnp.stack(left, axis=1), padding)
    return heads.astype(dtype), jnp.pad(jnp.stack(right, axis=1), padding).astype(dtype)


def _append(x: Array, dimensions: Array) -> Array:
    """Append `dimensions`, broadcast to `[..., DIMENSIONS]`, to the last axis of `x`."""
    dimensions = jnp.broadcast_to(dimensions, (*x.shape[:-1], DIMENSIONS))
    return jnp.concatenate([x, dimensions], axis=-1)
