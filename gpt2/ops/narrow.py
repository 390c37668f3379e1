"""16-bit floats as plain bits, the form in which XLA:CPU moves them at the speed of memory.

Of its own 16-bit types it gathers, slices and stores by way of float32: the whole table is
converted for a few rows, and a value kept for the backward pass is kept at twice its size.
"""

import jax
import jax.numpy as jnp


def bits(x: jax.Array) -> jax.Array:
    """Returns `x` as uint16 of the same bits if it holds 16-bit floats, else `x` itself."""
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if is_narrow else x


def floats(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The inverse of `bits`, given the type that `x` had."""
    return jax.lax.bitcast_convert_type(x, dtype)
