"""Causal attention for CPUs: in tiles that stay in cache, and none above the diagonal.

FlashAttention (Dao et al. 2022, algorithms 1 and 4) with the roles of its levels of memory given
to cache and main memory. A tile holds the scores of a block of queries with a block of keys. The
forward pass keeps a running maximum and normaliser of each row; the backward pass computes the
scores again from the saved log of the normaliser. No array of T x T ever exists.

Below, g is a group of sequences, small enough that its tile fits the second-level cache, and
arrays are `[blocks, g, N, block, H]`: taking a block is then taking contiguous memory.
"""

import jax
import jax.numpy as jnp

BLOCK = 128  # positions; measured in docs/performance.md
TILE = 2**19  # most scores in a tile: 2 MB of float32, the second-level caches of two cores
NEVER = -1e30  # the score of what must not be seen; finite, since -inf minus -inf is no number


def blocked_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None = None
) -> jax.Array:
    """`attention` in tiles: `[B, T, N, H]` each, `segments` `[B, T]` int32 or none."""
    B, T, N, _ = q.shape
    num_blocks = -(-T // BLOCK)
    block = -(-T // num_blocks)
    group = max(g for g in range(1, B + 1) if B % g == 0 and (g == 1 or g * N * block**2 <= TILE))

    def split(x):  # [B, T, ...] -> [groups, blocks, g, block, ...]
        x = jnp.pad(x, ((0, 0), (0, num_blocks * block - T)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(B // group, group, num_blocks, block, *x.shape[2:])
        return jnp.swapaxes(x, 1, 2)

    heads_first = [jnp.swapaxes(split(x), 3, 4) for x in (q, k, v)]
    out = _blocked(*heads_first, None if segments is None else split(segments))
    out = jnp.moveaxis(out, (2, 1, 4), (1, 2, 3))  # [groups, g, blocks, block, N, H]
    return out.reshape(B, num_blocks * block, N, -1)[:, :T]


@jax.custom_vjp
def _blocked(q, k, v, segments):
    return jax.lax.map(lambda args: _forward(*args)[0], (q, k, v, segments))


def _blocked_fwd(q, k, v, segments):
    out, log_normaliser = jax.lax.map(lambda args: _forward(*args), (q, k, v, segments))
    return out, (q, k, v, segments, out, log_normaliser)


def _blocked_bwd(residuals, dout):
    dq, dk, dv = jax.lax.map(lambda args: _backward(*args), (*residuals, dout))
    return dq, dk, dv, None


_blocked.defvjp(_blocked_fwd, _blocked_bwd)


def _forward(q, k, v, segments):
    """Returns the output `[blocks, g, N, block, H]` and log of the normaliser `[..., block, 1]`."""

    def rows(i):
        def tile(j, carry):
            highest, normaliser, out = carry
            scores = _dot("gnth,gnsh->gnts", q[i], k[j]) * q.shape[-1] ** -0.5
            scores = jnp.where(_visible(i, j, q.shape[3], segments), scores, NEVER)
            new_highest = jnp.maximum(highest, scores.max(axis=-1, keepdims=True))
            weights = jnp.exp(scores - new_highest)
            shrink = jnp.exp(highest - new_highest)
            normaliser = normaliser * shrink + weights.sum(axis=-1, keepdims=True)
            out = out * shrink + _dot("gnts,gnsh->gnth", weights.astype(v.dtype), v[j])
            return new_highest, normaliser, out

        column = jnp.zeros((*q.shape[1:4], 1), jnp.float32)
        start = column + NEVER, column, jnp.zeros(q.shape[1:], jnp.float32)
        highest, normaliser, out = jax.lax.fori_loop(0, i + 1, tile, start)
        return (out / normaliser).astype(q.dtype), highest + jnp.log(normaliser)

    return jax.lax.map(rows, jnp.arange(q.shape[0]))


def _backward(q, k, v, segments, out, log_normaliser, dout):
    """Returns the gradients of `q`, `k` and `v`.

    Tiles are transposed here, keys by queries, and the gradient of the queries is summed
    transposed: so every product takes its operands as they lie in memory.
    """
    scale = q.shape[-1] ** -0.5
    k_transposed = jnp.swapaxes(k, -1, -2)
    delta = (dout.astype(jnp.float32) * out).sum(axis=-1)[..., None, :]  # [blocks, g, N, 1, block]
    log_normaliser = jnp.swapaxes(log_normaliser, -1, -2)

    def columns(dq, j):
        def tile(i, carry):
            dq, dk, dv = carry
            scores = _dot("gnsh,gnth->gnst", k[j], q[i]) * scale
            visible = jnp.swapaxes(_visible(i, j, q.shape[3], segments), -1, -2)
            weights = jnp.where(visible, jnp.exp(scores - log_normaliser[i]), 0.0)
            dweights = _dot("gnsh,gnth->gnst", v[j], dout[i])
            dscores = (weights * (dweights - delta[i]) * scale).astype(q.dtype)
            dq = dq.at[i].add(_dot("gnhs,gnst->gnht", k_transposed[j], dscores))
            dk += _dot("gnst,gnth->gnsh", dscores, q[i])
            dv += _dot("gnst,gnth->gnsh", weights.astype(dout.dtype), dout[i])
            return dq, dk, dv

        zeros = jnp.zeros(k.shape[1:], jnp.float32)
        dq, dk, dv = jax.lax.fori_loop(j, q.shape[0], tile, (dq, zeros, zeros))
        return dq, (dk.astype(k.dtype), dv.astype(v.dtype))

    dq = jnp.zeros(k_transposed.shape, jnp.float32)
    dq, (dk, dv) = jax.lax.scan(columns, dq, jnp.arange(k.shape[0]))
    return jnp.swapaxes(dq, -1, -2).astype(q.dtype), dk, dv


def _visible(i, j, block, segments):
    """`[1 or g, 1, block, block]`: whether queries of block `i` may see keys of block `j`."""
    time = jnp.arange(block)
    visible = (i * block + time)[:, None] >= j * block + time
    if segments is None:
        return visible[None, None]
    return visible & (segments[i][:, None, :, None] == segments[j][:, None, None, :])


def _dot(equation, a, b):
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
