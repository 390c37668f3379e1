"""Rotary position embedding (Su et al. 2021).

A head's vector is split into halves a and b, as GPT-NeoX does: dimension i of either turns by the
angle `position / base^(2 i / H)`.
"""

import chex
import jax
import jax.numpy as jnp


def rotation(positions: jax.Array, head_size: int, base: float) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines of the angles, each `[B or 1, T, 1, H / 2]` float32.

    `positions` is `[B or 1, T]` int32; `base` is the longest wavelength over 2 pi, for large H.
    """
    half = head_size // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, :, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns the vectors of `x` `[B, T, N, H]`, computed in float32, by `rotation`'s angles."""
    B, T, _, H = x.shape
    chex.assert_shape([cos, sin], ({1, B}, T, 1, H // 2))
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)
