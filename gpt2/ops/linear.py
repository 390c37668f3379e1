"""The linear map, and the nonlinearity before it, with their own backward rules.

y = x w, dx = dy w^T and dw = x^T dy are direct products, so that each result has the layout in
which it is stored, and nothing is transposed in memory (docs/performance.md, XLA:CPU note 3): one
of the gradients that JAX derives is, which takes a third of a step of 124M on two cores.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from gpt2.ops import plain
from gpt2.ops.plain import Activation
from gpt2.ops.variants import Variants

Axes = Sequence[int]

# Below 32, or XLA:GPU adds them up in a kernel of its own. Few leave processors without work.
_STAGES = 16


def linear(
    x: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    num_contract: int = 1,
    activation: Activation | None = None,
    dtype: DTypeLike,
    variants: Variants,
) -> Array:
    """Computes `plain.linear`; the gradient of a float32 kernel stays in float32."""
    if activation is plain.gelu_tanh:
        activation = gelu_tanh
    how = _How(num_contract, activation, jnp.dtype(dtype), variants)
    return _linear(x.astype(dtype), kernel, bias, how)


def linear_apart(
    x: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    dtype: DTypeLike,
    variants: Variants,
) -> list[Array]:
    """Computes `plain.linear_parts` by a product for each part: none is copied."""
    how = _How(1, None, jnp.dtype(dtype), variants)
    kernels = [kernel[:, part] for part in range(kernel.shape[1])]
    return _parts(x.astype(dtype), kernels, bias, how)


def add_rows(x: Array, table: Array) -> Array:
    """Computes `plain.add_rows` as a product, whose gradient is a product too.

    For a sum over 32 sequences XLA:GPU stores the stream with the batch innermost, and transposes
    it for every linear map (11 % of a step of 124M on an H200).
    """
    rows = table[: x.shape[1]].astype(x.dtype)
    # A GPU would round float32; asked for in 16 bits, XLA would take it for a sum again.
    precision = "highest" if x.dtype == jnp.float32 else None
    ones = jnp.ones(len(x), x.dtype)
    return x + jnp.einsum("b,td->btd", ones, rows, precision=precision)


class _How(NamedTuple):
    """What a linear map is, beside its arrays."""

    num_contract: int
    activation: Activation | None
    dtype: jnp.dtype
    variants: Variants

    @property
    def result(self) -> DTypeLike:
        """The type in which products are returned."""
        return self.dtype if self.variants.narrow_results else jnp.float32

    @property
    def joins_product(self) -> bool:
        """Whether the activation joins the product that gives its operand, as cuBLAS can."""
        joins = self.activation is gelu_tanh and self.dtype.itemsize == 2
        return joins and self.variants.activation_joins

    def activate(self, x: Array) -> Array:
        """Returns the activation of `x`, or `x`."""
        if self.joins_product:
            # XLA looks for this formula, on a matrix. cuBLAS computes it in float32.
            rows = x.reshape(-1, x.shape[-1])
            return jax.nn.gelu(rows, approximate=True).reshape(x.shape)
        return self.activation(x) if self.activation else x

    def flatten(self, x: Array, kernel: Array) -> tuple[Array, Array, int]:
        """Returns `x`, a kernel and the number of axes to contract, as matrices where that pays."""
        if not self.variants.flat:
            return x, kernel, self.num_contract
        contracted = math.prod(kernel.shape[: self.num_contract])
        x = x.reshape(-1, contracted)
        kernel = kernel.reshape(contracted, -1)
        return x, kernel, 1

    def product(self, x: Array, kernel: Array, bias: Array | None) -> Array:
        """Returns `x @ kernel + bias` in the compute type."""
        kernel = kernel.astype(self.dtype)
        shape = (
            x.shape[: x.ndim - self.num_contract] + kernel.shape[self.num_contract :]
        )
        x, kernel, contracted = self.flatten(x, kernel)
        y = dot(
            x,
            kernel,
            range(x.ndim - contracted, x.ndim),
            range(contracted),
            self.result,
        )
        if bias is not None:
            y = y + bias.astype(self.result).reshape(kernel.shape[contracted:])
        return y.astype(self.dtype).reshape(shape)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _linear(x: Array, kernel: Array, bias: Array | None, how: _How) -> Array:
    return how.product(how.activate(x), kernel, bias)


def _linear_fwd(x, kernel, bias, how):
    activated = how.activate(x)
    kept = activated if how.joins_product else None
    return how.product(activated, kernel, bias), (x, kept, kernel, bias)


def _linear_bwd(how, residuals, dy):
    x, kept, kernel, bias = residuals
    x_shape = x.shape
    kernel_type = kernel.dtype
    kernel_shape = kernel.shape
    kernel = kernel.astype(how.dtype)
    x, kernel, contracted = how.flatten(x, kernel)
    rows = range(x.ndim - contracted)  # the axes over which examples and positions run
    dy = dy.reshape(*x.shape[: len(rows)], *kernel.shape[contracted:])
    outputs = range(len(rows), dy.ndim)
    if how.activation and kept is None:
        # The barrier makes XLA compute the activation again (docs/performance.md, XLA:CPU note 4).
        # It stands before the product, which XLA:TPU lets compute the derivative.
        x, dy = jax.lax.optimization_barrier((x, dy))
    dx = dot(dy, kernel, outputs, range(contracted, kernel.ndim), how.result)
    dx = dx.astype(how.dtype)
    if how.activation:
        x, derive = jax.vjp(how.activation, x)
        (dx,) = derive(dx)
    if kept is not None:
        x = kept.reshape(x.shape)
    dkernel = dot(x, dy, rows, rows).astype(kernel_type).reshape(kernel_shape)
    dx = dx.reshape(x_shape)
    if bias is None:
        return dx, dkernel, None
    dbias = bias_gradient(dy, len(rows), how.variants)
    return dx, dkernel, dbias.astype(bias.dtype).reshape(bias.shape)


_linear.defvjp(_linear_fwd, _linear_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _parts(
    x: Array, kernels: Sequence[Array], bias: Array | None, how: _How
) -> list[Array]:
    if bias is None:
        return [how.product(x, kernel, None) for kernel in kernels]
    # Cast before it is cut apart, or XLA:GPU takes a kernel for each.
    biases = bias.astype(how.result)
    return [
        how.product(x, kernel, b) for kernel, b in zip(kernels, biases, strict=True)
    ]


def _parts_fwd(x, kernels, bias, how):
    return _parts(x, kernels, bias, how), (x, kernels, bias)


def _parts_bwd(how, residuals, dys):
    """Adds up gradients of `x` inside the products, as cuBLAS can."""
    x, kernels, bias = residuals
    dx = None
    dkernels = []
    for kernel, dy in zip(kernels, dys, strict=True):
        dx_part, dkernel, _ = _linear_bwd(how, (x, None, kernel, None), dy)
        # In this order XLA adds in the product.
        dx = dx_part if dx is None else dx_part + dx
        dkernels.append(dkernel)
    if bias is None:
        return dx, dkernels, None
    rows = x.ndim - 1
    if how.variants.joint_sums:
        dbias = sum_rows(jnp.stack(dys, rows), rows, how.variants)
    else:
        dbias = jnp.stack([bias_gradient(dy, rows, how.variants) for dy in dys])
    return dx, dkernels, dbias.astype(bias.dtype)


_parts.defvjp(_parts_fwd, _parts_bwd)


def dot(
    a: Array, b: Array, axes_a: Axes, axes_b: Axes, dtype: DTypeLike = jnp.float32
) -> Array:
    """Contracts axes of `a` with axes of `b` in float32: `[rest of a, rest of b]` in `dtype`."""
    dimensions = ((tuple(axes_a), tuple(axes_b)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=dtype)


def sum_rows(x: Array, num_rows: int, variants: Variants) -> Array:
    """Returns the float32 sum over the first `num_rows` axes.

    XLA:GPU takes such a sum in two kernels. Here one leaves 16 sums, often beside what computes
    the rows, and adding these up joins what reads the result.
    """
    rows = math.prod(x.shape[:num_rows])
    if not variants.joint_sums or rows % _STAGES:
        return x.sum(tuple(range(num_rows)), dtype=jnp.float32)
    parts = (
        x.astype(jnp.float32)
        .reshape(_STAGES, rows // _STAGES, *x.shape[num_rows:])
        .sum(1)
    )
    parts = jax.lax.optimization_barrier(parts)  # or XLA takes both stages for one sum
    sums = [parts[part] for part in range(_STAGES)]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def bias_gradient(dy: Array, num_rows: int, variants: Variants) -> Array:
    """Returns `sum_rows` of the gradient of a linear map's result, as a product where that pays."""
    rounds = dy.dtype == jnp.float32 and variants.rounds_float32
    if not variants.ones_for_bias or rounds:
        return sum_rows(dy, num_rows, variants)
    ones = jnp.ones((2, *dy.shape[:num_rows]), dy.dtype)
    sums = dot(ones, dy, range(1, num_rows + 1), range(num_rows))
    return sums[0]


# GELU's tanh form (Hendrycks and Gimpel 2016, section 2): x (1 + tanh u) / 2 = x / (1 + exp(-2 u))
# with u = sqrt(2 / pi) (x + 0.044715 x^3). The backward rule uses the quotient again, so that
# XLA:CPU stores it (docs/performance.md, XLA:CPU note 2).
_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715


def _exp_minus_2u(x):
    # Infinite far below 0; x over it is -0.
    return jnp.exp(-_SLOPE * (x + _CUBIC * x**3))


def _gelu_fwd(x):
    # `linear` calls this in its own backward pass, so y lives no longer than that.
    x32 = x.astype(jnp.float32)
    y = x32 / (1.0 + _exp_minus_2u(x32))
    return y.astype(x.dtype), (x, y)


def _gelu_bwd(residuals, dy):
    x, y = residuals
    x32 = x.astype(jnp.float32)
    sigmoid = 1.0 / (1.0 + _exp_minus_2u(x32))
    slope_of_2u = _SLOPE * (1.0 + 3.0 * _CUBIC * x32**2)
    # In this order, y (1 - sigmoid) is 0 before a large slope can make it infinite.
    dx = dy.astype(jnp.float32) * (sigmoid + y * (1.0 - sigmoid) * slope_of_2u)
    return (dx.astype(x.dtype),)


@jax.custom_vjp
def gelu_tanh(x: Array) -> Array:
    """Computes `plain.gelu_tanh`."""
    return _gelu_fwd(x)[0]


gelu_tanh.defvjp(_gelu_fwd, _gelu_bwd)
