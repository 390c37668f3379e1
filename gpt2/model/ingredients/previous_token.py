"""The token before each one, also in cached decoding, where it may not be among the inputs."""

import jax.numpy as jnp
from jax import Array

from gpt2.model.seams import Context


def shift(x: Array, first: Array, context: Context, *, missing: int) -> Array:
    """Return `x` `[B, T, ...]` of the position before each one.

    `first` `[B, 1, ...]` belongs to the position before the first one. Where a segment begins,
    there is no such position, and the result is `missing`.
    """
    previous = jnp.concatenate([first, x[:, :-1]], axis=1)
    exists = context.positions > 0
    ones = (1,) * (x.ndim - 2)
    exists = exists.reshape(*exists.shape, *ones)
    return jnp.where(exists, previous, missing)


def first_previous(context: Context) -> Array:
    """Return the tokens before the first ones, int32 `[B, 1]`; any token if there is none."""
    if context.last_token is None:
        return context.tokens[:, :1]
    return context.last_token[:, None]
