"""Causal attention for CPUs, one block of queries at a time.

A block of queries reads only the keys up to the end of the block. A block is large enough for its
matrix products to use all threads (docs/performance.md, XLA:CPU note 7), and heads are processed in
groups, so that a group's scores fit in the caches. The backward pass recomputes the scores, as
FlashAttention does (Dao et al. 2022, algorithm 4). The reference implementation takes a quarter of
a 124M step on two cores, and spends half of that time on scores above the diagonal, which are
masked.

The B * N heads of a batch of B sequences are divided into groups of g heads. Arrays in this file
are `[groups, g, T, H]`.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from gpt2.ops import plain
from gpt2.ops.plain import Scoring
from gpt2.utils.remat import CORE_ATTENTION

# Number of queries per block. It is changed if a sequence would otherwise have fewer than 2 or more
# than 8 blocks. A layer of the 124M model takes 44.5 ms with 256 queries, and 51 ms with 128.
BLOCK = 256
# The largest number of scores in a group of several heads. In float32 they take 2 MB, which the
# second-level caches of two cores can hold.
MAX_SCORES = 2**19
# The score of a masked pair of query and key. It is finite, because -inf minus -inf is NaN.
MASKED = -1e30


def blocked_attention(
    q: Array, k: Array, v: Array, segments: Array | None, scoring: Scoring
) -> Array:
    """Compute causal attention, as `plain.attention` does, in blocks of queries.

    `q` and the result are `[B, T, N, H]`, and `k` and `v` are `[B, T, K, H]`.
    """
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    v = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
    options = _Options(scoring.scale, scoring.window, scoring.softcap or 0.0)
    return _attention(q, k, v, segments, options)


class _Options(NamedTuple):
    """The numbers in a `Scoring` that are constants of the compiled kernel.

    A `softcap` of 0 means no soft cap.
    """

    scale: float
    window: int
    softcap: float

    def scores(self, products: Array) -> Array:
        """Scale products of queries and keys, and apply the soft cap if there is one."""
        scores = products * self.scale
        if self.softcap:
            scores = self.softcap * jnp.tanh(scores / self.softcap)
        return scores


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q, k, v, segments, options):
    """Apply attention to queries, keys and values `[B, T, N, H]`."""
    return _blocked_fwd(q, k, v, segments, options)[0]


def _blocked_fwd(q, k, v, segments, options):
    groups = (_split(q), _split(k), _split(v))
    T = groups[0].shape[2]
    blocks = _blocks(T, segments, options.window, transposed=False)
    sequences = _sequences(groups[0], q)

    def run(operands):
        return _forward(*operands, blocks=blocks, options=options)

    results = jax.lax.map(run, (groups, sequences))
    # A remat policy that stores attention's output must also store the normalisers.
    out, log_normaliser = checkpoint_name(results, CORE_ATTENTION)
    residuals = (*groups, segments, out, log_normaliser)
    return _join(out, q), residuals


def _blocked_bwd(options, residuals, dout):
    q, k, v, segments, out, log_normaliser = residuals
    k_transposed = jnp.swapaxes(k, -1, -2)
    groups = (q, k, k_transposed, v, out, _split(dout), log_normaliser)
    T = q.shape[2]
    blocks = _blocks(T, segments, options.window, transposed=True)
    sequences = _sequences(q, dout)

    def run(operands):
        return _backward(*operands, blocks=blocks, options=options)

    dq, dk, dv = jax.lax.map(run, (groups, sequences))
    dq = jnp.swapaxes(dq, -1, -2)
    return _join(dq, dout), _join(dk, dout), _join(dv, dout), None


_attention.defvjp(_blocked_fwd, _blocked_bwd)


def _num_blocks(T):
    return min(max(2, -(-T // BLOCK)), 8)


def _split(x):
    """Divide the B * N heads of `x` `[B, T, N, H]` into groups, and return `[groups, g, T, H]`.

    A group has g heads: the largest divisor of B * N for which the scores of g heads, in one block
    of queries, are at most `MAX_SCORES`; at least 1. In the result, T is padded to a multiple of
    the number of blocks.
    """
    num_blocks = _num_blocks(x.shape[1])
    missing = -x.shape[1] % num_blocks
    x = jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0)))
    B, T, N, H = x.shape
    # The number of scores of one head in the last block, which has the most.
    per_head = T * T // num_blocks
    group = max(1, min(MAX_SCORES // per_head, B * N))
    while B * N % group:
        group -= 1
    by_head = jnp.swapaxes(x, 1, 2)
    return by_head.reshape(B * N // group, group, T, H)


def _join(x, like):
    """Return the groups of heads `x` `[groups, g, T, H]` as one array `[B, T, N, H]`.

    The result has the shape of `like`. Padding at the end of the axis T of `x` is removed.
    """
    B, T, N, H = like.shape
    by_head = x.reshape(B, N, -1, H)
    real = by_head[:, :, :T]
    return jnp.swapaxes(real, 1, 2)


def _sequences(groups, like):
    """Return the index of the sequence to which each head belongs, `[groups, g]`.

    `groups` is `[groups, g, T, H]`, and `like` is the array `[B, T, N, H]` before it was divided.
    """
    B, _, N, _ = like.shape
    sequences = jnp.arange(B * N) // N
    return sequences.reshape(groups.shape[:2])


def _forward(groups, sequences, *, blocks, options):
    """Return the output `[g, T, H]` of g heads, and the log of softmax's normaliser `[g, T, 1]`."""
    q, k, v = groups
    outs = []
    log_normalisers = []
    for queries, keys, visible in blocks:
        products = _dot("gth,gsh->gts", q[:, queries], k[:, keys])
        scores = options.scores(products)
        visible = visible if visible.ndim == 2 else visible[sequences]
        scores = jnp.where(visible, scores, MASKED)
        highest = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - highest)
        normaliser = weights.sum(axis=-1, keepdims=True)
        out = _dot("gts,gsh->gth", weights.astype(q.dtype), v[:, keys]) / normaliser
        outs.append(out.astype(q.dtype))
        log_normalisers.append(highest + jnp.log(normaliser))
    return jnp.concatenate(outs, axis=1), jnp.concatenate(log_normalisers, axis=1)


def _backward(groups, sequences, *, blocks, options):
    """Return the gradients of g heads' queries `[g, H, T]`, and of keys and values `[g, T, H]`.

    `groups` contains the heads' queries, keys, keys transposed `[g, H, T]`, values, outputs and
    gradients of the outputs (`[g, T, H]` unless stated), and the log of softmax's normaliser
    `[g, T, 1]`. `sequences` `[g]` is the sequence of each head, as an index of its masks.

    Scores and masks are transposed to `[keys, queries]`, and the gradient of the queries to
    `[H, T]`. Products then read their operands in memory order (docs/performance.md, XLA:CPU notes
    6 and 7).
    """
    q, k, k_transposed, v, out, dout, log_normaliser = groups
    dtype = dout.dtype
    log_normaliser = jnp.swapaxes(log_normaliser, -1, -2)
    # The row sums of dweights * weights, computed without these matrices (Dao et al. 2022,
    # appendix B).
    delta = (dout.astype(jnp.float32) * out).sum(axis=-1)[:, None]
    dqs = []
    dk = jnp.zeros(k.shape, jnp.float32)
    dv = jnp.zeros(v.shape, jnp.float32)
    for queries, keys, visible in blocks:
        products = _dot("gsh,gth->gst", k[:, keys], q[:, queries])
        scores = options.scores(products)
        weights = jnp.exp(scores - log_normaliser[..., queries])
        visible = visible if visible.ndim == 2 else visible[sequences]
        weights = jnp.where(visible, weights, 0.0)
        dweights = _dot("gsh,gth->gst", v[:, keys], dout[:, queries])
        dscores = weights * (dweights - delta[..., queries]) * options.scale
        if options.softcap:
            dscores *= 1.0 - (scores / options.softcap) ** 2
        dscores = dscores.astype(dtype)
        dqs.append(_dot("ghs,gst->ght", k_transposed[..., keys], dscores))
        dk = dk.at[:, keys].add(_dot("gst,gth->gsh", dscores, q[:, queries]))
        weights = weights.astype(dtype)
        dv = dv.at[:, keys].add(_dot("gst,gth->gsh", weights, dout[:, queries]))
    dq = jnp.concatenate(dqs, axis=-1)
    return dq.astype(dtype), dk.astype(dtype), dv.astype(dtype)


def _blocks(T, segments, window, transposed):
    """Return a tuple for each block: the slice of queries, the slice of keys, and the mask.

    A mask is `[queries, keys]` or, if there are `segments`, `[B, queries, keys]`. With
    `transposed`, the last two axes of masks are swapped.
    """
    block = T // _num_blocks(T)
    if segments is not None:
        missing = T - segments.shape[1]
        segments = jnp.pad(segments, ((0, 0), (0, missing)))

    def pairs(x, queries, keys):
        # The results broadcast to `[..., queries, keys]`, or with `transposed` to
        # `[..., keys, queries]`.
        query = x[..., queries]
        key = x[..., keys]
        if transposed:
            return query[..., None, :], key[..., :, None]
        return query[..., :, None], key[..., None, :]

    blocks = []
    for end in range(block, T + 1, block):
        start = max(0, end - block - window + 1) if window else 0
        queries = slice(end - block, end)
        keys = slice(start, end)
        query, key = pairs(jnp.arange(T), queries, keys)
        visible = plain.visible_keys(query, key, window)
        if segments is not None:
            visible = visible & jnp.equal(*pairs(segments, queries, keys))
        blocks.append((queries, keys, visible))
    return blocks


def _dot(equation, a, b):
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
