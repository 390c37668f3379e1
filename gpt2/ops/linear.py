"""A linear map, and the nonlinearity before it, with their own backward rule.

The rule states three direct matrix products,

    y = x w        dx = dy w^T        dw = x^T dy

so that each result has the layout in which it is stored, and nothing is transposed in memory
(docs/performance.md, XLA:CPU note 4).
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import chex
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from gpt2.ops.dot import dot
from gpt2.ops.narrow import bits, floats


class Pieces(Protocol):
    """How a kernel of which each device holds a piece is made whole: `gpt2.parallel.pieces`."""

    def gather(self, piece: jax.Array) -> jax.Array:
        """Returns the whole kernel."""

    def scatter(self, gradient: jax.Array) -> jax.Array:
        """Returns the piece of the sum of all devices' gradients."""

    def before_backward(self, piece: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns its arguments, of which the backward pass gathers and multiplies."""

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a kernel whose pieces have this shape."""


def linear(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    *,
    num_contract: int = 1,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    dtype: DTypeLike | None = None,
    pieces: Pieces | None = None,
) -> jax.Array:
    """Contracts the last axes of `activation(x)` with the first of `kernel` and adds `bias`.

    Operands are cast to `dtype` and multiplied with float32 accumulation. The gradient of a
    float32 kernel stays in float32, so it loses nothing to a narrower compute type.

    Args:
        x: `[..., C1, .., Cn]`, n = `num_contract`.
        kernel: `[C1, .., Cn, O1, .., Om]`, any m, e.g. `[D, 3, N, H]` for queries, keys, values.
        bias: `[O1, .., Om]`.
        num_contract: the number of contracted axes.
        activation: an elementwise function or None. The backward pass keeps its input and computes
            its value again.
        dtype: compute and result type; that of `x` if not given.
        pieces: if given, `kernel` is a piece. The whole is gathered in `dtype`, once forward and
            once backward, and never kept.

    Returns:
        `[..., O1, .., Om]` in `dtype`.
    """
    _check_shapes(x, kernel, bias, num_contract, pieces)
    dtype = jnp.dtype(dtype or x.dtype)
    return _linear(x.astype(dtype), kernel, bias, num_contract, activation, dtype, pieces)


def linear_reference(x, kernel, bias=None, *, num_contract=1, activation=None, dtype=None):
    """Computes `linear` as one `tensordot`, with the derivative left to JAX."""
    _check_shapes(x, kernel, bias, num_contract)
    dtype = jnp.dtype(dtype or x.dtype)
    x = activation(x.astype(dtype)) if activation else x.astype(dtype)
    y = jnp.tensordot(x, kernel.astype(dtype), num_contract, preferred_element_type=jnp.float32)
    return (y if bias is None else y + bias).astype(dtype)


def _check_shapes(x, kernel, bias, num_contract, pieces=None):
    """A bias of another shape than the outputs' would broadcast."""
    chex.assert_type([x, kernel], float)
    shape = pieces.whole_shape(kernel.shape) if pieces else kernel.shape
    chex.assert_equal(shape[:num_contract], x.shape[-num_contract:])
    if bias is not None:
        chex.assert_shape(bias, shape[num_contract:])


def _whole(kernel, dtype, pieces):
    return pieces.gather(kernel.astype(dtype)) if pieces else kernel.astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _linear(x, kernel, bias, num_contract, activation, dtype, pieces):
    contract_x = range(x.ndim - num_contract, x.ndim)
    x = activation(x) if activation else x
    y = dot(x, _whole(kernel, dtype, pieces), contract_x, range(num_contract))
    return (y if bias is None else y + bias).astype(dtype)


def _linear_fwd(x, kernel, bias, *options):
    return _linear(x, kernel, bias, *options), (bits(x), kernel, bias)


def _linear_bwd(num_contract, activation, dtype, pieces, residuals, dy):
    x, kernel, bias = residuals
    if pieces:
        kernel, dy = pieces.before_backward(kernel, dy)
    rows = range(x.ndim - num_contract)  # the axes over which examples and positions run
    outputs = kernel.ndim - num_contract
    dx = dot(
        dy,
        _whole(kernel, dtype, pieces),
        range(dy.ndim - outputs, dy.ndim),
        range(num_contract, kernel.ndim),
    ).astype(dtype)
    if activation:
        # The barrier makes XLA compute the activation again, not keep the forward pass's value
        # (docs/performance.md, XLA:CPU note 5).
        x, dx = jax.lax.optimization_barrier((x, dx))
        x, derive = jax.vjp(activation, floats(x, dtype))
        (dx,) = derive(dx)
    else:
        x = floats(x, dtype)
    dkernel = dot(x, dy, rows, rows).astype(kernel.dtype)
    if pieces:
        dkernel = pieces.scatter(dkernel)
    dbias = None
    if bias is not None:
        # A matrix product with ones is computed at once; a sum would wait, and dy with it
        # (docs/performance.md, XLA:CPU note 6).
        ones = jnp.ones(dy.shape[: len(rows)], dtype)
        dbias = dot(ones, dy, rows, rows).astype(bias.dtype)
    return dx, dkernel, dbias


_linear.defvjp(_linear_fwd, _linear_bwd)
