"""Causal attention for CPUs: a block of queries at a time, with the keys up to its own end.

Each block gives matrix products that are large enough for all threads (docs/performance.md, XLA:CPU
note 10). A few heads at a time give scores that are small enough for the caches. Softmax sees whole
rows. Of what n blocks compute, one part in n + 1 lies above the diagonal.

The backward pass computes the scores again from the saved log of the normaliser, as FlashAttention
does (Dao et al. 2022, algorithm 4). No scores are kept for it. At most T x T / n scores of a head
exist at a time, beside masks of one byte for each pair.

Below, g is a group of heads of one sequence, and arrays are `[groups, g, T, H]`. They hold 16-bit
floats as plain bits, which move faster (docs/performance.md, XLA:CPU note 3).
"""

import jax
import jax.numpy as jnp

from gpt2.ops.narrow import bits, floats

BLOCK = 256  # queries in a block, if that makes 2 to 8 blocks; measured in docs/log.md
SCORES = 2**19  # at a time, if one head has no more: 2 MB, the second-level caches of two cores
NEVER = -1e30  # the score of a hidden pair; finite, since -inf minus -inf is NaN


@jax.custom_vjp
def blocked_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None = None
) -> jax.Array:
    """Computes `attention` in blocks.

    Args:
        q, k, v: `[B, T, N, H]`, one type.
        segments: `[B, T]` int32 or None; a position sees only positions of the same number.

    Returns:
        `[B, T, N, H]` of the type of `q`.
    """
    return _blocked_fwd(q, k, v, segments)[0]


def _blocked_fwd(q, k, v, segments):
    groups = tuple(map(_split, (q, k, v)))
    blocks = _blocks(groups[0].shape[2], segments, transposed=False)
    out, log_normaliser = jax.lax.map(
        lambda args: _forward(*args, blocks=blocks, dtype=q.dtype),
        (*groups, _sequence_numbers(groups[0], q)),
    )
    return _join(out, q), (*groups, segments, out, log_normaliser)


def _blocked_bwd(residuals, dout):
    q, k, v, segments, out, log_normaliser = residuals
    groups = q, k, jnp.swapaxes(k, -1, -2), v, out, log_normaliser, _split(dout)
    blocks = _blocks(q.shape[2], segments, transposed=True)
    dq, dk, dv = jax.lax.map(
        lambda args: _backward(*args, blocks=blocks, dtype=dout.dtype),
        (*groups, _sequence_numbers(q, dout)),
    )
    return *(_join(x, dout) for x in (jnp.swapaxes(dq, -1, -2), dk, dv)), None


blocked_attention.defvjp(_blocked_fwd, _blocked_bwd)


def _num_blocks(T):
    return min(max(2, -(-T // BLOCK)), 8)


def _split(x):
    """`[B, T, N, H]` to the bits of `[groups, g, T, H]`, T filled up to whole blocks."""
    x = jnp.pad(bits(x), ((0, 0), (0, -x.shape[1] % _num_blocks(x.shape[1])), (0, 0), (0, 0)))
    B, T, N, H = x.shape
    per_head = T * T // _num_blocks(T)  # scores of the last block
    group = max(g for g in range(1, N + 1) if N % g == 0 and (g == 1 or g * per_head <= SCORES))
    return jnp.swapaxes(x, 1, 2).reshape(B * N // group, group, T, H)


def _join(x, like):
    """The inverse of `_split`, to the shape and type of `like` `[B, T, N, H]`."""
    B, T, N, H = like.shape
    x = x.reshape(B, N, -1, H)[:, :, :T]
    return floats(jnp.swapaxes(x, 1, 2), like.dtype)


def _sequence_numbers(groups, like):
    """Returns the number, in the batch, of each group's sequence: `[groups]` int32."""
    return jnp.arange(len(groups)) // (len(groups) // len(like))


def _forward(q, k, v, sequence, *, blocks, dtype):
    """Returns the output `[g, T, H]`, as bits, and the log of the normaliser `[g, T, 1]`."""
    q, k, v = (floats(x, dtype) for x in (q, k, v))
    outs, log_normalisers = [], []
    for queries, keys, visible in blocks:
        scores = _dot("gth,gsh->gts", q[:, queries], k[:, keys]) * q.shape[-1] ** -0.5
        scores = jnp.where(_mask_for(visible, sequence), scores, NEVER)
        highest = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - highest)
        normaliser = weights.sum(axis=-1, keepdims=True)
        out = _dot("gts,gsh->gth", weights.astype(dtype), v[:, keys]) / normaliser
        outs.append(bits(out.astype(dtype)))
        log_normalisers.append(highest + jnp.log(normaliser))
    return jnp.concatenate(outs, axis=1), jnp.concatenate(log_normalisers, axis=1)


def _backward(q, k, k_transposed, v, out, log_normaliser, dout, sequence, *, blocks, dtype):
    """Returns the gradients of q `[g, H, T]`, of k and of v `[g, T, H]`, as bits.

    Scores are transposed here, keys by queries, and so is the gradient of the queries. Every matrix
    product then takes its operands as they lie in memory (docs/performance.md, XLA:CPU note 10).
    """
    q, k, k_transposed, v, out, dout = (
        floats(x, dtype) for x in (q, k, k_transposed, v, out, dout)
    )
    scale = q.shape[-1] ** -0.5
    log_normaliser = jnp.swapaxes(log_normaliser, -1, -2)
    delta = (dout.astype(jnp.float32) * out).sum(axis=-1)[:, None]
    dqs, dk, dv = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for queries, keys, visible in blocks:
        scores = _dot("gsh,gth->gst", k[:, keys], q[:, queries]) * scale
        weights = jnp.exp(scores - log_normaliser[..., queries])
        weights = jnp.where(_mask_for(visible, sequence), weights, 0.0)
        dweights = _dot("gsh,gth->gst", v[:, keys], dout[:, queries])
        dscores = (weights * (dweights - delta[..., queries]) * scale).astype(dtype)
        dqs.append(_dot("ghs,gst->ght", k_transposed[..., keys], dscores))
        dk = dk.at[:, keys].add(_dot("gst,gth->gsh", dscores, q[:, queries]))
        dv = dv.at[:, keys].add(_dot("gst,gth->gsh", weights.astype(dtype), dout[:, queries]))
    return tuple(bits(x.astype(dtype)) for x in (jnp.concatenate(dqs, axis=-1), dk, dv))


def _blocks(T, segments, transposed):
    """Lists each block's queries, its keys, and the mask of the pairs that see each other.

    Masks are computed here, before any loop over heads.
    """
    block = T // _num_blocks(T)
    if segments is not None:
        segments = jnp.pad(segments, ((0, 0), (0, T - segments.shape[1])))
    blocks = []
    for end in range(block, T + 1, block):
        queries, keys = slice(end - block, end), slice(end)
        blocks.append((queries, keys, _visible(T, queries, keys, segments, transposed)))
    return blocks


def _visible(T, queries, keys, segments, transposed):
    """Returns the mask `[queries, keys]`, or transposed; with segments `[B, ...]`.

    It is computed in the orientation that reads it (docs/performance.md, XLA:CPU note 9).
    """

    def pairs(x):
        query, key = x[..., queries], x[..., keys]
        if transposed:
            return query[..., None, :], key[..., :, None]
        return query[..., :, None], key[..., None, :]

    query_time, key_time = pairs(jnp.arange(T))
    visible = query_time >= key_time
    if segments is None:
        return visible
    query_segment, key_segment = pairs(segments)
    return visible & (query_segment == key_segment)


def _mask_for(visible, sequence):
    return visible if visible.ndim == 2 else visible[sequence]


def _dot(equation, a, b):
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
