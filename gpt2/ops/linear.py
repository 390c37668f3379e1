"""A linear map, and the nonlinearity before it, with their own backward rule.

Reverse mode of `x @ w` asks XLA for the weight gradient transposed, and XLA:CPU turns that
transpose into slow strided loops: a third of a training step. Stated as three direct products,

    y = x w        dx = dy w^T        dw = x^T dy

each result comes out in the layout in which it is stored, and nothing is transposed in memory.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from gpt2.ops.narrow import bits, floats


def linear(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    *,
    num_contract: int = 1,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Contracts the last axes of `activation(x)` with the first of `kernel` and adds `bias`.

    Operands are cast to `dtype` and multiplied with float32 accumulation. The gradient of the
    kernel leaves the product in float32, so float32 master weights lose nothing to a narrower
    compute type.

    Args:
        x: `[..., C1, .., Cn]`, n = `num_contract`.
        kernel: `[C1, .., Cn, O1, .., Om]`, any m, e.g. `[D, 3, N, H]` for queries, keys, values.
        bias: `[O1, .., Om]`.
        num_contract: the number of contracted axes.
        activation: elementwise. The backward pass keeps its input and computes its value again,
            so that of the two only one is kept.
        dtype: compute and result type; that of `x` if not given.

    Returns:
        `[..., O1, .., Om]` in `dtype`.
    """
    dtype = jnp.dtype(dtype or x.dtype)
    return _linear(x.astype(dtype), kernel, bias, num_contract, activation, dtype)


def linear_reference(x, kernel, bias=None, *, num_contract=1, activation=None, dtype=None):
    """What `linear` computes, as one `tensordot` with the derivative left to JAX."""
    dtype = jnp.dtype(dtype or x.dtype)
    x = activation(x.astype(dtype)) if activation else x.astype(dtype)
    y = jnp.tensordot(x, kernel.astype(dtype), num_contract, preferred_element_type=jnp.float32)
    return (y if bias is None else y + bias).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _linear(x, kernel, bias, num_contract, activation, dtype):
    contract_x = range(x.ndim - num_contract, x.ndim)
    x = activation(x) if activation else x
    y = _dot(x, kernel.astype(dtype), contract_x, range(num_contract))
    return (y if bias is None else y + bias).astype(dtype)


def _linear_fwd(x, kernel, bias, num_contract, activation, dtype):
    return _linear(x, kernel, bias, num_contract, activation, dtype), (bits(x), kernel, bias)


def _linear_bwd(num_contract, activation, dtype, residuals, dy):
    x, kernel, bias = residuals
    rows = range(x.ndim - num_contract)  # the axes over which examples and positions run
    outputs = kernel.ndim - num_contract
    dx = _dot(
        dy,
        kernel.astype(dtype),
        range(dy.ndim - outputs, dy.ndim),
        range(num_contract, kernel.ndim),
    ).astype(dtype)
    if activation:
        # Without a barrier XLA would keep the forward pass's value for here.
        x, dx = jax.lax.optimization_barrier((x, dx))
        x, derive = jax.vjp(activation, floats(x, dtype))
        (dx,) = derive(dx)
    else:
        x = floats(x, dtype)
    dkernel = _dot(x, dy, rows, rows).astype(kernel.dtype)
    dbias = None
    if bias is not None:
        # A product with ones: XLA would put off a sum until it joins the optimizer's, and keep dy.
        ones = jnp.ones(dy.shape[: len(rows)], dtype)
        dbias = _dot(ones, dy, rows, rows).astype(bias.dtype)
    return dx, dkernel, dbias


_linear.defvjp(_linear_fwd, _linear_bwd)


def _dot(a, b, contract_a, contract_b):
    """The product of `a` and `b` over the given axes, accumulated and returned in float32."""
    dimensions = ((tuple(contract_a), tuple(contract_b)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)
