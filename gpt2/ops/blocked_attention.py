"""Causal attention for CPUs: a block of queries at a time, with the keys up to its own end.

Each block gives products that are large enough for all threads (docs/performance.md, XLA:CPU note
10), some heads at a time scores that fit the caches. Softmax sees whole rows. The backward pass
computes the scores again, as FlashAttention does (Dao et al. 2022, algorithm 4).

Arrays are `[groups, g, T, H]`, g heads in a group. They hold 16-bit floats as bits (note 3).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gpt2.ops.arrays import bits, floats
from gpt2.ops.scores import Scoring
from gpt2.utils.remat import CORE_ATTENTION

BLOCK = 256  # queries in a block, if that makes 2 to 8 blocks; measured in docs/log.md
SCORES = (
    2**19
)  # at a time, if one head has no more: 2 MB, the second-level caches of two cores
NEVER = -1e30  # the score of a hidden pair; finite, since -inf minus -inf is NaN


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def blocked_attention(
    q: jax.Array,  # [B, T, N, H], and so are k and v
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None = None,
    slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
    scoring: Scoring = Scoring(),
) -> jax.Array:
    """Computes `attention` in blocks; no gradient reaches `segments` and `slopes`."""
    return _blocked_fwd(q, k, v, segments, slopes, sinks, scoring)[0]


def _blocked_fwd(q, k, v, segments, slopes, sinks, scoring):
    groups = tuple(map(_split, (q, k, v)))
    blocks = _blocks(groups[0].shape[2], segments, scoring, transposed=False)
    run = partial(_forward, blocks=blocks, scoring=scoring, dtype=q.dtype)
    operands = groups, _by_head(groups[0], q, slopes, sinks)
    out, log_normaliser = jax.lax.map(lambda args: run(*args), operands)
    out, log_normaliser = checkpoint_name((out, log_normaliser), CORE_ATTENTION)
    return _join(out, q), (*groups, segments, slopes, sinks, out, log_normaliser)


def _blocked_bwd(scoring, residuals, dout):
    q, k, v, segments, slopes, sinks, out, log_normaliser = residuals
    groups = q, k, jnp.swapaxes(k, -1, -2), v, out, _split(dout), log_normaliser
    blocks = _blocks(q.shape[2], segments, scoring, transposed=True)
    run = partial(_backward, blocks=blocks, scoring=scoring, dtype=dout.dtype)
    operands = groups, _by_head(q, dout, slopes, sinks)
    dq, dk, dv, dsinks = jax.lax.map(lambda args: run(*args), operands)
    if sinks is not None:
        dsinks = dsinks.reshape(-1, len(sinks)).sum(axis=0)
    return (
        *(_join(x, dout) for x in (jnp.swapaxes(dq, -1, -2), dk, dv)),
        None,
        None,
        dsinks,
    )


blocked_attention.defvjp(_blocked_fwd, _blocked_bwd)


def _num_blocks(T):
    return min(max(2, -(-T // BLOCK)), 8)


def _split(x):
    """`[B, T, N, H]` to the bits of `[groups, g, T, H]`, T filled up to whole blocks."""
    x = jnp.pad(
        bits(x), ((0, 0), (0, -x.shape[1] % _num_blocks(x.shape[1])), (0, 0), (0, 0))
    )
    B, T, N, H = x.shape
    per_head = T * T // _num_blocks(T)  # scores of the last block
    most = max(1, SCORES // per_head)
    group = max(g for g in range(1, min(most, B * N) + 1) if B * N % g == 0)
    return jnp.swapaxes(x, 1, 2).reshape(B * N // group, group, T, H)


def _join(x, like):
    """The inverse of `_split`, to the shape and type of `like` `[B, T, N, H]`."""
    B, T, N, H = like.shape
    x = x.reshape(B, N, -1, H)[:, :, :T]
    return floats(jnp.swapaxes(x, 1, 2), like.dtype)


def _by_head(groups, like, *numbers):
    """Returns the number of each head's sequence, and numbers `[N]` or None, `[groups, g]`."""
    B, _, N, _ = like.shape
    sequences = (jnp.arange(B * N) // N).reshape(groups.shape[:2])
    tiled = (
        x if x is None else jnp.tile(x, B).reshape(groups.shape[:2]) for x in numbers
    )
    return sequences, *tiled


def _forward(groups, by_head, *, blocks, scoring, dtype):
    """Returns the output `[g, T, H]`, as bits, and the log of the normaliser `[g, T, 1]`."""
    (q, k, v), (sequences, slopes, sinks) = (floats(x, dtype) for x in groups), by_head
    outs = []
    log_normalisers = []
    for queries, keys, visible in blocks:
        products = _dot("gth,gsh->gts", q[:, queries], k[:, keys])
        scores = scoring.scores(products, q.shape[-1])
        if slopes is not None:
            scores += slopes[:, None, None] * _distance(queries, keys)
        scores = jnp.where(
            visible if visible.ndim == 2 else visible[sequences], scores, NEVER
        )
        highest = scores.max(axis=-1, keepdims=True)
        if sinks is not None:
            highest = jnp.maximum(highest, sinks[:, None, None])
        weights = jnp.exp(scores - highest)
        normaliser = weights.sum(axis=-1, keepdims=True)
        if sinks is not None:
            normaliser += jnp.exp(sinks[:, None, None] - highest)
        out = _dot("gts,gsh->gth", weights.astype(dtype), v[:, keys]) / normaliser
        outs.append(bits(out.astype(dtype)))
        log_normalisers.append(highest + jnp.log(normaliser))
    return jnp.concatenate(outs, axis=1), jnp.concatenate(log_normalisers, axis=1)


def _backward(groups, by_head, *, blocks, scoring, dtype):
    """Returns the gradients of q `[g, H, T]`, k and v `[g, T, H]`, as bits, and sinks `[g]`.

    Scores, masks and the queries' gradient are transposed, keys by queries: products then take
    their operands as they lie in memory (docs/performance.md, XLA:CPU notes 9 and 10).
    """
    *groups, log_normaliser = groups
    q, k, k_transposed, v, out, dout = (floats(x, dtype) for x in groups)
    sequences, slopes, sinks = by_head
    factor = scoring.factor(q.shape[-1])
    log_normaliser = jnp.swapaxes(log_normaliser, -1, -2)
    delta = (dout.astype(jnp.float32) * out).sum(axis=-1)[:, None]
    dsinks = None
    if sinks is not None:  # a sink is a key whose value is 0
        dsinks = -(jnp.exp(sinks[:, None, None] - log_normaliser) * delta).sum(
            axis=(1, 2)
        )
    dqs = []
    dk = jnp.zeros(k.shape, jnp.float32)
    dv = jnp.zeros(v.shape, jnp.float32)
    for queries, keys, visible in blocks:
        products = _dot("gsh,gth->gst", k[:, keys], q[:, queries])
        capped = scoring.scores(products, q.shape[-1])
        scores = capped
        if slopes is not None:
            scores += slopes[:, None, None] * _distance(queries, keys).T
        weights = jnp.exp(scores - log_normaliser[..., queries])
        weights = jnp.where(
            visible if visible.ndim == 2 else visible[sequences], weights, 0.0
        )
        dweights = _dot("gsh,gth->gst", v[:, keys], dout[:, queries])
        dscores = weights * (dweights - delta[..., queries]) * factor
        if scoring.softcap:
            dscores *= 1.0 - (capped / scoring.softcap) ** 2
        dscores = dscores.astype(dtype)
        dqs.append(_dot("ghs,gst->ght", k_transposed[..., keys], dscores))
        dk = dk.at[:, keys].add(_dot("gst,gth->gsh", dscores, q[:, queries]))
        dv = dv.at[:, keys].add(
            _dot("gst,gth->gsh", weights.astype(dtype), dout[:, queries])
        )
    dqkv = jnp.concatenate(dqs, axis=-1), dk, dv
    return *(bits(x.astype(dtype)) for x in dqkv), dsinks


def _distance(queries, keys):
    """Returns the position of each key less that of each query, `[queries, keys]` float32."""
    query, key = (
        jnp.arange(x.start, x.stop, dtype=jnp.float32) for x in (queries, keys)
    )
    return key - query[:, None]


def _blocks(T, segments, scoring, transposed):
    """Lists each block's queries, keys and mask."""
    block = T // _num_blocks(T)
    if segments is not None:
        segments = jnp.pad(segments, ((0, 0), (0, T - segments.shape[1])))

    def pairs(x, queries, keys):  # broadcast to `[..., queries, keys]`, or transposed
        query = x[..., queries]
        key = x[..., keys]
        if transposed:
            return query[..., None, :], key[..., :, None]
        return query[..., :, None], key[..., None, :]

    blocks = []
    for end in range(block, T + 1, block):
        start = max(0, end - block - scoring.window + 1) if scoring.window else 0
        queries = slice(end - block, end)
        keys = slice(start, end)
        visible = scoring.visible(*pairs(jnp.arange(T), queries, keys))
        if segments is not None:
            visible = visible & jnp.equal(*pairs(segments, queries, keys))
        blocks.append((queries, keys, visible))
    return blocks


def _dot(equation, a, b):
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
