"""Causal attention for CPUs: in tiles that stay in cache, and none above the diagonal.

FlashAttention (Dao et al. 2022, algorithms 1 and 4) with the roles of its levels of memory given
to cache and main memory. A tile holds the scores of a block of queries with a block of keys. The
forward pass keeps a running maximum and normaliser of each row; the backward pass computes the
scores again from the saved log of the normaliser. No array of T x T ever exists.

Below, g is a group of sequences, small enough that its tile fits the second-level cache, and
arrays are `[blocks, g, N, block, H]`: taking a block is then taking contiguous memory. They hold
16-bit floats as plain bits: XLA:CPU moves those of its own type by way of float32, which would cost
as much as a third of the products do.
"""

import jax
import jax.numpy as jnp

from gpt2.ops.narrow import bits, floats

BLOCK = 128  # positions; measured in docs/performance.md
TILE = 2**19  # most scores in a tile: 2 MB of float32, the second-level caches of two cores
NEVER = -1e30  # the score of what must not be seen; finite, since -inf minus -inf is no number


@jax.custom_vjp
def blocked_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None = None
) -> jax.Array:
    """`attention` in tiles: `[B, T, N, H]` each, `segments` `[B, T]` int32 or none."""
    return _blocked_fwd(q, k, v, segments)[0]


def _blocked_fwd(q, k, v, segments):
    inputs = [None if x is None else _split(x, *q.shape[:3]) for x in (q, k, v, segments)]
    out, log_normaliser = jax.lax.map(lambda args: _forward(*args, q.dtype), inputs)
    return _join(out, q), (*inputs, out, log_normaliser)


def _blocked_bwd(residuals, dout):
    arguments = (*residuals, _split(dout, *dout.shape[:3]))
    gradients = jax.lax.map(lambda args: _backward(*args, dout.dtype), arguments)
    return *(_join(x, dout) for x in gradients), None


blocked_attention.defvjp(_blocked_fwd, _blocked_bwd)


def _split(x, B, T, N):
    """`[B, T, N, H]` to the bits of `[groups, blocks, g, N, block, H]`; `[B, T]` likewise."""
    num_blocks = -(-T // BLOCK)
    block = -(-T // num_blocks)
    group = max(g for g in range(1, B + 1) if B % g == 0 and (g == 1 or g * N * block**2 <= TILE))
    x = jnp.pad(bits(x), ((0, 0), (0, num_blocks * block - T)) + ((0, 0),) * (x.ndim - 2))
    x = x.reshape(B // group, group, num_blocks, block, *x.shape[2:])
    return x.transpose((0, 2, 1, 4, 3, 5) if x.ndim == 6 else (0, 2, 1, 3))


def _join(x, like):
    """The inverse of `_split`, to the shape and type of `like` `[B, T, N, H]`."""
    B, T, N, H = like.shape
    x = x.transpose(0, 2, 1, 4, 3, 5).reshape(B, -1, N, H)
    return floats(x[:, :T], like.dtype)


def _forward(q, k, v, segments, dtype):
    """Returns the output `[blocks, g, N, block, H]` and log of the normaliser `[..., block, 1]`."""

    def rows(i):
        query = floats(q[i], dtype)

        def tile(j, carry):
            highest, normaliser, out = carry
            scores = _dot("gnth,gnsh->gnts", query, floats(k[j], dtype)) * q.shape[-1] ** -0.5
            scores = jnp.where(_visible(i, j, q.shape[3], segments), scores, NEVER)
            new_highest = jnp.maximum(highest, scores.max(axis=-1, keepdims=True))
            weights = jnp.exp(scores - new_highest)
            shrink = jnp.exp(highest - new_highest)
            normaliser = normaliser * shrink + weights.sum(axis=-1, keepdims=True)
            weighted = _dot("gnts,gnsh->gnth", weights.astype(dtype), floats(v[j], dtype))
            return new_highest, normaliser, out * shrink + weighted

        column = jnp.zeros((*q.shape[1:4], 1), jnp.float32)
        start = column + NEVER, column, jnp.zeros(q.shape[1:], jnp.float32)
        highest, normaliser, out = jax.lax.fori_loop(0, i + 1, tile, start)
        return bits((out / normaliser).astype(dtype)), highest + jnp.log(normaliser)

    return jax.lax.map(rows, jnp.arange(q.shape[0]))


def _backward(q, k, v, segments, out, log_normaliser, dout, dtype):
    """Returns the gradients of `q`, `k` and `v`, as bits.

    Tiles are transposed here, keys by queries, and the gradient of the queries is summed
    transposed: so every product takes its operands as they lie in memory.
    """
    scale = q.shape[-1] ** -0.5
    k_transposed = jnp.swapaxes(k, -1, -2)
    delta = floats(dout, dtype).astype(jnp.float32) * floats(out, dtype)
    delta = delta.sum(axis=-1)[..., None, :]  # [blocks, g, N, 1, block]
    log_normaliser = jnp.swapaxes(log_normaliser, -1, -2)

    def columns(dq, j):
        def tile(i, carry):
            dq, dk, dv = carry
            query, dvalue = floats(q[i], dtype), floats(dout[i], dtype)
            scores = _dot("gnsh,gnth->gnst", floats(k[j], dtype), query) * scale
            visible = jnp.swapaxes(_visible(i, j, q.shape[3], segments), -1, -2)
            weights = jnp.where(visible, jnp.exp(scores - log_normaliser[i]), 0.0)
            dweights = _dot("gnsh,gnth->gnst", floats(v[j], dtype), dvalue)
            dscores = (weights * (dweights - delta[i]) * scale).astype(dtype)
            dq = dq.at[i].add(_dot("gnhs,gnst->gnht", floats(k_transposed[j], dtype), dscores))
            dk += _dot("gnst,gnth->gnsh", dscores, query)
            dv += _dot("gnst,gnth->gnsh", weights.astype(dtype), dvalue)
            return dq, dk, dv

        zeros = jnp.zeros(k.shape[1:], jnp.float32)
        dq, dk, dv = jax.lax.fori_loop(j, q.shape[0], tile, (dq, zeros, zeros))
        return dq, (bits(dk.astype(dtype)), bits(dv.astype(dtype)))

    dq = jnp.zeros(k_transposed.shape, jnp.float32)
    dq, (dk, dv) = jax.lax.scan(columns, dq, jnp.arange(k.shape[0]))
    return jnp.swapaxes(bits(dq.astype(dtype)), -1, -2), dk, dv


def _visible(i, j, block, segments):
    """`[1 or g, 1, block, block]`: whether queries of block `i` may see keys of block `j`."""
    time = jnp.arange(block)
    visible = (i * block + time)[:, None] >= j * block + time
    if segments is None:
        return visible[None, None]
    return visible & (segments[i][:, None, :, None] == segments[j][:, None, None, :])


def _dot(equation, a, b):
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
