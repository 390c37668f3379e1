"""16-bit floats as plain bits.

XLA:CPU moves bits as they are, and 16-bit floats by way of float32 (docs/performance.md, XLA:CPU
note 3).
"""

import jax
import jax.numpy as jnp

from gpt2.ops.forms import forms


def bits(x: jax.Array) -> jax.Array:
    """Returns `x` as uint16 of the same bits if it holds 16-bit floats, else `x` itself.

    On platforms other than CPUs it is `x` too: bits gain nothing there.
    """
    if not forms().bits:
        return x
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if is_narrow else x


def floats(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the floats of type `dtype` that `bits` turned into `x`: its inverse."""
    if x.dtype == dtype:
        return x
    return jax.lax.bitcast_convert_type(x, dtype)
