"""Sums over rows, which gradients of scales and biases are."""

import math

import jax
import jax.numpy as jnp

from gpt2.ops.dot import dot
from gpt2.ops.forms import forms

# Below 32, or XLA:GPU adds them up in a kernel of its own. Few leave processors without work.
_PARTS = 16


def sum_rows(x: jax.Array, num_rows: int) -> jax.Array:
    """Returns the float32 sum over the first axes.

    XLA:GPU takes such a sum in two kernels, one of which adds up what the other left. In the form
    for one GPU a kernel leaves 16 sums, often beside what computes the rows, and adding these up
    joins what reads the result. Rows that do not split into 16 parts are summed plainly.

    Args:
        x: `[R1, .., Rn, ...]`, n = `num_rows`.
        num_rows: the number of axes.
    """
    rows, rest = math.prod(x.shape[:num_rows]), x.shape[num_rows:]
    if not forms().staged_sums or rows % _PARTS:
        return x.sum(tuple(range(num_rows)), dtype=jnp.float32)
    parts = x.astype(jnp.float32).reshape(_PARTS, rows // _PARTS, *rest).sum(1)
    parts = jax.lax.optimization_barrier(parts)  # or XLA takes both stages for one sum
    sums = [parts[part] for part in range(_PARTS)]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def bias_gradient(dy: jax.Array, num_rows: int) -> jax.Array:
    """Returns `sum_rows` of the gradient of a linear map's result, as a product where that pays."""
    copies = forms().ones_for_bias
    if not copies or (dy.dtype == jnp.float32 and forms().rounds_float32):
        return sum_rows(dy, num_rows)
    rows = range(num_rows)
    if copies == 1:
        return dot(jnp.ones(dy.shape[:num_rows], dy.dtype), dy, rows, rows)
    ones = jnp.ones((copies, *dy.shape[:num_rows]), dy.dtype)
    return dot(ones, dy, range(1, num_rows + 1), rows)[0]
