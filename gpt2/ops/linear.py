"""A linear map, and the nonlinearity before it, with their own backward rule.

y = x w, dx = dy w^T and dw = x^T dy are direct products, so that each result has the layout in
which it is stored, and nothing is transposed in memory (docs/performance.md, XLA:CPU note 4).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from gpt2.ops.arrays import bias_gradient, bits, dot, floats, result_type, sum_rows
from gpt2.ops.variants import variants
from gpt2.utils.platform import target


def linear(
    x: jax.Array,  # [..., C1, .., Cn], n = `num_contract`
    kernel: jax.Array,  # [C1, .., Cn, O1, .., Om], any m, e.g. [D, 3, N, H]
    bias: jax.Array | None = None,  # [O1, .., Om]
    *,
    num_contract: int = 1,
    activation: Callable[[jax.Array], jax.Array] | None = None,  # elementwise
    dtype: DTypeLike | None = None,  # of operands and result; that of `x` if not given
    shards: Any = None,  # `gpt2.parallel.fsdp.Shards`, if `kernel` is a shard
) -> jax.Array:
    """Contracts `activation(x)` with `kernel`, in float32, and adds `bias`: `[..., O1, .., Om]`.

    The gradient of a float32 kernel stays in float32. A sharded kernel is gathered in `dtype`, once
    forward and once backward, and never kept.
    """
    _check_shapes(x, kernel, bias, num_contract, shards)
    dtype = jnp.dtype(dtype or x.dtype)
    if target().plain and shards is None:
        return linear_reference(x, kernel, bias, num_contract, activation, dtype)
    x = x.astype(dtype)
    return _linear(x, kernel, bias, num_contract, activation, dtype, shards)


def linear_parts(
    x: jax.Array,  # [..., C]
    kernel: jax.Array,  # [C, P, O1, .., Om]
    bias: jax.Array | None = None,  # [P, O1, .., Om]
    *,
    dtype: DTypeLike | None = None,
    shards: Any = None,
) -> list[jax.Array]:
    """Returns `linear` as a list of P results `[..., O1, .., Om]`."""
    if target().plain or not variants().apart:
        y = linear(x, kernel, bias, dtype=dtype, shards=shards)
        axis = x.ndim - 1
        return [part.squeeze(axis) for part in jnp.split(y, kernel.shape[1], axis)]
    _check_shapes(x, kernel, bias, 1, shards)
    dtype = jnp.dtype(dtype or x.dtype)
    kernels = [kernel[:, part] for part in range(kernel.shape[1])]
    return _parts(x.astype(dtype), kernels, bias, dtype, shards)


def linear_reference(
    x, kernel, bias=None, num_contract=1, activation=None, dtype="float32"
):
    """Computes `linear` as one `tensordot`, with the derivative left to JAX."""
    x = activation(x.astype(dtype)) if activation else x.astype(dtype)
    y = jnp.tensordot(
        x, kernel.astype(dtype), num_contract, preferred_element_type=jnp.float32
    )
    return (y if bias is None else y + bias).astype(dtype)


def _check_shapes(x, kernel, bias, num_contract, shards):
    """A bias of another shape than the outputs' would broadcast."""
    chex.assert_type([x, kernel], float)
    shape = shards.whole_shape(kernel.shape) if shards else kernel.shape
    chex.assert_equal(shape[:num_contract], x.shape[-num_contract:])
    if bias is not None:
        chex.assert_shape(bias, shape[num_contract:])


def _whole(kernel, dtype, shards):
    return shards.gather(kernel.astype(dtype)) if shards else kernel.astype(dtype)


def _flatten(x, kernel, num_contract):
    if not variants().flat:
        return x, kernel, num_contract
    contracted = math.prod(kernel.shape[:num_contract])
    return x.reshape(-1, contracted), kernel.reshape(contracted, -1), 1


def _product(x, kernel, bias, num_contract, dtype, shards):
    kernel = _whole(kernel, dtype, shards)
    rows = x.shape[: x.ndim - num_contract]
    outputs = kernel.shape[num_contract:]
    x, kernel, num_contract = _flatten(x, kernel, num_contract)
    result = result_type(dtype)
    y = dot(
        x, kernel, range(x.ndim - num_contract, x.ndim), range(num_contract), result
    )
    if bias is not None:
        y = y + bias.astype(result).reshape(kernel.shape[num_contract:])
    return y.astype(dtype).reshape(*rows, *outputs)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _linear(x, kernel, bias, num_contract, activation, dtype, shards):
    x = activation(x) if activation else x
    return _product(x, kernel, bias, num_contract, dtype, shards)


def _linear_fwd(x, kernel, bias, num_contract, activation, dtype, shards):
    activated = activation(x) if activation else x
    y = _product(activated, kernel, bias, num_contract, dtype, shards)
    return y, (bits(x), kernel, bias)


def _linear_bwd(num_contract, activation, dtype, shards, residuals, dy):
    x, kernel, bias = residuals
    if shards:
        kernel, dy = shards.before_backward(kernel, dy)
    x_shape = x.shape
    kernel_type = kernel.dtype
    kernel = _whole(kernel, dtype, shards)
    kernel_shape = kernel.shape
    x, kernel, num_contract = _flatten(x, kernel, num_contract)
    rows = range(
        x.ndim - num_contract
    )  # the axes over which examples and positions run
    dy = dy.reshape(*(x.shape[axis] for axis in rows), *kernel.shape[num_contract:])
    outputs = range(len(rows), dy.ndim)
    if activation:
        # The barrier makes XLA compute the activation again (docs/performance.md, XLA:CPU note 5).
        # It stands before the product, which XLA:TPU lets compute the derivative.
        x, dy = jax.lax.optimization_barrier((x, dy))
    dx = dot(dy, kernel, outputs, range(num_contract, kernel.ndim), result_type(dtype))
    dx = dx.astype(dtype)
    x = floats(x, dtype)
    if activation:
        x, derive = jax.vjp(activation, x)
        (dx,) = derive(dx)
    dkernel = dot(x, dy, rows, rows).astype(kernel_type).reshape(kernel_shape)
    if shards:
        dkernel = shards.scatter(dkernel)
    dx = dx.reshape(x_shape)
    if bias is None:
        return dx, dkernel, None
    dbias = bias_gradient(dy, len(rows))
    return dx, dkernel, dbias.astype(bias.dtype).reshape(bias.shape)


_linear.defvjp(_linear_fwd, _linear_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _parts(x, kernels, bias, dtype, shards):
    # Cast before they are cut apart, or XLA:GPU takes a kernel for each.
    biases = [None] * len(kernels) if bias is None else bias.astype(result_type(dtype))
    pairs = zip(kernels, biases, strict=True)
    return [_product(x, kernel, bias, 1, dtype, shards) for kernel, bias in pairs]


def _parts_fwd(x, kernels, bias, dtype, shards):
    return _parts(x, kernels, bias, dtype, shards), (bits(x), kernels, bias)


def _parts_bwd(dtype, shards, residuals, dys):
    """Adds up gradients of `x` inside the products, as cuBLAS can."""
    x, kernels, bias = residuals
    dx = None
    dkernels = []
    options = (1, None, dtype, shards)
    for kernel, dy in zip(kernels, dys, strict=True):
        dx_part, dkernel, _ = _linear_bwd(*options, (x, kernel, None), dy)
        dx = (
            dx_part if dx is None else dx_part + dx
        )  # in this order XLA adds in the product
        dkernels.append(dkernel)
    if bias is None:
        return dx, dkernels, None
    rows = x.ndim - 1
    if variants().joint_sums:
        dbias = sum_rows(jnp.stack(dys, rows), rows)
    else:
        dbias = jnp.stack([bias_gradient(dy, rows) for dy in dys])
    return dx, dkernels, dbias.astype(bias.dtype)


_parts.defvjp(_parts_fwd, _parts_bwd)
