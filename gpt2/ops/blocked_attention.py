"""Causal attention for CPUs: rows of scores a block at a time, and nothing above the diagonal.

A block of queries needs the keys up to its own end and no others, so half of the scores are never
computed; and as it meets all of those keys at once, its softmax is final and needs no running
maximum. The backward pass computes the scores again from the saved log of the normaliser
(FlashAttention, Dao et al. 2022, section 3.1), so that no array of T x T outlives its block.
"""

import jax
import jax.numpy as jnp

BLOCK = 128  # query positions; measured in docs/performance.md


def blocked_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None = None
) -> jax.Array:
    """`attention` in blocks: `[B, T, N, H]` each, `segments` `[B, T]` int32 or none."""
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))  # [B, N, T, H], as the products want it
    return jnp.swapaxes(_blocked(q, k, v, segments), 1, 2)


@jax.custom_vjp
def _blocked(q, k, v, segments):
    return _blocked_fwd(q, k, v, segments)[0]


def _blocked_fwd(q, k, v, segments):
    outs, log_normalisers = [], []
    for rows, seen in _blocks(q.shape[2]):
        scores = _scores(q, k, segments, rows, seen)
        highest = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - highest)
        normaliser = weights.sum(axis=-1, keepdims=True)
        out = _dot("bnts,bnsh->bnth", weights.astype(q.dtype), v[:, :, seen]) / normaliser
        outs.append(out.astype(q.dtype))
        log_normalisers.append(highest + jnp.log(normaliser))
    out = jnp.concatenate(outs, axis=2)
    return out, (q, k, v, segments, out, jnp.concatenate(log_normalisers, axis=2))


def _blocked_bwd(residuals, dout):
    q, k, v, segments, out, log_normaliser = residuals
    scale = q.shape[-1] ** -0.5
    delta = (dout.astype(jnp.float32) * out).sum(axis=-1, keepdims=True)  # [B, N, T, 1]
    dq = []
    dk, dv = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for rows, seen in _blocks(q.shape[2]):
        weights = jnp.exp(_scores(q, k, segments, rows, seen) - log_normaliser[:, :, rows])
        dweights = _dot("bnth,bnsh->bnts", dout[:, :, rows], v[:, :, seen])
        dscores = (weights * (dweights - delta[:, :, rows]) * scale).astype(q.dtype)
        dq.append(_dot("bnts,bnsh->bnth", dscores, k[:, :, seen]).astype(q.dtype))
        dk = dk.at[:, :, seen].add(_dot("bnts,bnth->bnsh", dscores, q[:, :, rows]))
        dv = dv.at[:, :, seen].add(
            _dot("bnts,bnth->bnsh", weights.astype(q.dtype), dout[:, :, rows])
        )
    return jnp.concatenate(dq, axis=2), dk.astype(k.dtype), dv.astype(v.dtype), None


_blocked.defvjp(_blocked_fwd, _blocked_bwd)


def _blocks(length):
    """For each block of queries, its rows and the keys that its last row may see."""
    starts = range(0, length, BLOCK)
    ends = [min(start + BLOCK, length) for start in starts]
    return [(slice(start, end), slice(0, end)) for start, end in zip(starts, ends, strict=True)]


def _scores(q, k, segments, rows, seen):
    """Scaled scores `[B, N, rows, seen]` in float32, -inf where a row must not look."""
    scores = _dot("bnth,bnsh->bnts", q[:, :, rows], k[:, :, seen]) * q.shape[-1] ** -0.5
    visible = jnp.arange(rows.start, rows.stop)[:, None] >= jnp.arange(seen.stop)
    if segments is not None:
        visible &= segments[:, None, rows, None] == segments[:, None, None, seen]
    return jnp.where(visible, scores, -jnp.inf)


def _dot(equation, a, b):
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
