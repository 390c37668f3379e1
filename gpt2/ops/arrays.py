"""What several operations are made of: products, sums over rows, 16-bit floats as bits, padding."""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from gpt2.ops.variants import variants
from gpt2.utils.platform import target

# Below 32, or XLA:GPU adds them up in a kernel of its own. Few leave processors without work.
_STAGES = 16


def dot(
    a: jax.Array, b: jax.Array, axes_a, axes_b, dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Contracts axes of `a` with axes of `b` in float32: `[rest of a, rest of b]` in `dtype`."""
    dimensions = ((tuple(axes_a), tuple(axes_b)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=dtype)


def result_type(dtype: DTypeLike) -> DTypeLike:
    """Returns the type in which the platform wants results of products that are kept in `dtype`."""
    return dtype if variants().narrow_results else jnp.float32


def sum_rows(x: jax.Array, num_rows: int) -> jax.Array:
    """Returns the float32 sum over the first `num_rows` axes.

    XLA:GPU takes such a sum in two kernels. Here one leaves 16 sums, often beside what computes
    the rows, and adding these up joins what reads the result.
    """
    rows = math.prod(x.shape[:num_rows])
    rest = x.shape[num_rows:]
    if not variants().joint_sums or rows % _STAGES:
        return x.sum(tuple(range(num_rows)), dtype=jnp.float32)
    parts = x.astype(jnp.float32).reshape(_STAGES, rows // _STAGES, *rest).sum(1)
    parts = jax.lax.optimization_barrier(parts)  # or XLA takes both stages for one sum
    sums = [parts[part] for part in range(_STAGES)]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def bias_gradient(dy: jax.Array, num_rows: int) -> jax.Array:
    """Returns `sum_rows` of the gradient of a linear map's result, as a product where that pays."""
    copies = variants().ones_for_bias
    if not copies or (dy.dtype == jnp.float32 and variants().rounds_float32):
        return sum_rows(dy, num_rows)
    rows = range(num_rows)
    if copies == 1:
        return dot(jnp.ones(dy.shape[:num_rows], dy.dtype), dy, rows, rows)
    ones = jnp.ones((copies, *dy.shape[:num_rows]), dy.dtype)
    return dot(ones, dy, range(1, num_rows + 1), rows)[0]


def bits(x: jax.Array) -> jax.Array:
    """Returns 16-bit floats as uint16 on a CPU, which moves them as they are (XLA:CPU note 3)."""
    if not variants().bits:
        return x
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if is_narrow else x


def floats(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the floats of type `dtype` that `bits` turned into `x`: its inverse."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def pad_rows(table: jax.Array, multiple: int) -> jax.Array:
    """Returns `table` `[V, D]` with rows of zeros up to a multiple."""
    padding = -len(table) % multiple
    # By nothing too: XLA:CPU sums the squares of a gradient that comes straight from a product in
    # windows, which takes ten times as long.
    return (_pad if not padding or target().plain else _pad_apart)(table, padding)


def _pad(table, padding):
    return jnp.pad(table, ((0, padding), (0, 0)))


# The barrier makes XLA cut off the padding where the gradient is read. It would else cut what adds
# up to the gradient, in copies.
_pad_apart = jax.custom_vjp(_pad, nondiff_argnums=(1,))
_pad_apart.defvjp(
    lambda table, padding: (_pad(table, padding), None),
    lambda padding, _, dtable: (jax.lax.optimization_barrier(dtable)[:-padding],),
)
