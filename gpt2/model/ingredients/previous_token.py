"""The previous token of each position.

In cached decoding, the token before the first input is not among the inputs.
`Context.last_token` holds it.
"""

import jax.numpy as jnp
from jax import Array

from gpt2.model.seams import Context


def shift(x: Array, first: Array, context: Context, *, missing: int) -> Array:
    """Return `x` `[B, T, ...]`, shifted so that each position has the previous position's value.

    `first` `[B, 1, ...]` is the value before the first position. At the start of a segment there is
    no previous position, and the result is `missing`.
    """
    previous = jnp.concatenate([first, x[:, :-1]], axis=1)
    exists = context.positions > 0
    ones = (1,) * (x.ndim - 2)
    exists = exists.reshape(*exists.shape, *ones)
    return jnp.where(exists, previous, missing)


def first_previous(context: Context) -> Array:
    """Return the token before each row's first input, int32 `[B, 1]`.

    If there is no such token, return arbitrary tokens, which `shift` replaces with `missing`.
    """
    if context.last_token is None:
        return context.tokens[:, :1]
    return context.last_token[:, None]
