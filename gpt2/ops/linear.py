"""Linear maps, and the activation before them, with hand-written backward rules.

y = x w, dx = dy w^T and dw = x^T dy are computed by direct products. Every result then has the
layout in which it is stored, and nothing is transposed in memory (docs/performance.md, XLA:CPU
note 3). JAX's own backward rules transpose one of the gradients, which takes a third of a 124M step
on two cores.
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

# Number of partial sums in `sum_rows`. XLA:GPU would add up 32 or more in a separate kernel, and a
# smaller number would leave some processors of the GPU idle.
_NUM_PARTIAL_SUMS = 16


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
    """Compute `activation(x) @ kernel + bias`, as `plain.linear` does.

    `x` is `[..., C1, .., Cn]` with n = `num_contract`, `kernel` is `[C1, .., Cn, O1, .., Om]`, and
    `bias` is `[O1, .., Om]`. The result is `[..., O1, .., Om]` in `dtype`. The backward rule is
    written by hand, and does not round the gradient of a float32 kernel to `dtype`. `variants`
    chooses how the products are computed.
    """
    if activation is plain.gelu_tanh:
        activation = gelu_tanh
    spec = _LinearMap(num_contract, activation, jnp.dtype(dtype), variants)
    return _linear(x.astype(dtype), kernel, bias, spec)


def linear_separately(
    x: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    dtype: DTypeLike,
    variants: Variants,
) -> list[Array]:
    """Apply P linear maps to `x` `[..., C]`, as `plain.linear_parts` does, with P products.

    `kernel` is `[C, P, O1, .., Om]`, `bias` is `[P, O1, .., Om]`, and each of the P results (such
    as queries, keys and values) is `[..., O1, .., Om]`. A single product would return one array,
    out of which each result would have to be copied.
    """
    spec = _LinearMap(1, None, jnp.dtype(dtype), variants)
    kernels = [kernel[:, part] for part in range(kernel.shape[1])]
    return _parts(x.astype(dtype), kernels, bias, spec)


def add_rows(x: Array, table: Array) -> Array:
    """Add the first T rows of a table `[rows, D]` to every sequence of `x` `[B, T, D]`.

    The rows are multiplied by a vector of B ones, so that their gradient is a product too. If the
    gradient were a sum over 32 or more sequences, XLA:GPU would store the residual stream with the
    batch innermost, and transpose it for every linear map (11 % of a 124M step on an H200).
    """
    rows = table[: x.shape[1]].astype(x.dtype)
    # By default, GPUs would round float32 operands to TF32, and "highest" prevents this. 16-bit
    # operands are not rounded, and with "highest" XLA would compute their gradient as a sum.
    precision = "highest" if x.dtype == jnp.float32 else None
    ones = jnp.ones(len(x), x.dtype)
    return x + jnp.einsum("b,td->btd", ones, rows, precision=precision)


class _LinearMap(NamedTuple):
    """The static part of a linear map: everything but its arrays."""

    num_contract: int
    activation: Activation | None
    dtype: jnp.dtype
    variants: Variants

    @property
    def result(self) -> DTypeLike:
        """The dtype of the results of products."""
        return self.dtype if self.variants.narrow_results else jnp.float32

    @property
    def is_fused(self) -> bool:
        """Whether cuBLAS computes the activation within the matrix product that precedes it."""
        can_fuse = self.activation is gelu_tanh and self.dtype.itemsize == 2
        return can_fuse and self.variants.fuse_activation

    def activate(self, x: Array) -> Array:
        """Apply the activation to `x`, if there is one."""
        if self.is_fused:
            # If `x` is a matrix, XLA replaces this formula with the GELU of cuBLAS, which computes
            # in float32, although `x` has 16 bits.
            rows = x.reshape(-1, x.shape[-1])
            return jax.nn.gelu(rows, approximate=True).reshape(x.shape)
        return self.activation(x) if self.activation else x

    def flatten(self, x: Array, kernel: Array) -> tuple[Array, Array, int]:
        """Return `x`, the kernel, and the number of axes to contract.

        With the variant `as_matrices`, both are reshaped to matrices and one axis is contracted.
        """
        if not self.variants.as_matrices:
            return x, kernel, self.num_contract
        contracted = math.prod(kernel.shape[: self.num_contract])
        x = x.reshape(-1, contracted)
        kernel = kernel.reshape(contracted, -1)
        return x, kernel, 1

    def product(self, x: Array, kernel: Array, bias: Array | None) -> Array:
        """Return `x @ kernel + bias` in the compute dtype."""
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
def _linear(x: Array, kernel: Array, bias: Array | None, spec: _LinearMap) -> Array:
    return spec.product(spec.activate(x), kernel, bias)


def _linear_fwd(x, kernel, bias, spec):
    activated = spec.activate(x)
    # The backward pass reads the stored value of a fused activation, and does not recompute it.
    stored = activated if spec.is_fused else None
    return spec.product(activated, kernel, bias), (x, stored, kernel, bias)


def _linear_bwd(spec, residuals, dy):
    x, stored, kernel, bias = residuals
    x_shape = x.shape
    kernel_type = kernel.dtype
    kernel_shape = kernel.shape
    kernel = kernel.astype(spec.dtype)
    x, kernel, contracted = spec.flatten(x, kernel)
    rows = range(x.ndim - contracted)  # the axes of examples and positions
    dy = dy.reshape(*x.shape[: len(rows)], *kernel.shape[contracted:])
    outputs = range(len(rows), dy.ndim)
    if spec.activation and stored is None:
        # The barrier makes XLA recompute the activation (docs/performance.md, XLA:CPU note 4). The
        # barrier precedes the product, so that XLA:TPU can fuse the activation's derivative into
        # the product.
        x, dy = jax.lax.optimization_barrier((x, dy))
    dx = dot(dy, kernel, outputs, range(contracted, kernel.ndim), spec.result)
    dx = dx.astype(spec.dtype)
    if spec.activation:
        x, derive = jax.vjp(spec.activation, x)
        (dx,) = derive(dx)
    if stored is not None:
        x = stored.reshape(x.shape)
    dkernel = dot(x, dy, rows, rows).astype(kernel_type).reshape(kernel_shape)
    dx = dx.reshape(x_shape)
    if bias is None:
        return dx, dkernel, None
    dbias = bias_gradient(dy, len(rows), spec.variants)
    return dx, dkernel, dbias.astype(bias.dtype).reshape(bias.shape)


_linear.defvjp(_linear_fwd, _linear_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _parts(
    x: Array, kernels: Sequence[Array], bias: Array | None, spec: _LinearMap
) -> list[Array]:
    if bias is None:
        return [spec.product(x, kernel, None) for kernel in kernels]
    # The biases are cast before they are separated. Otherwise XLA:GPU launches a kernel for each
    # bias.
    biases = bias.astype(spec.result)
    return [
        spec.product(x, kernel, b) for kernel, b in zip(kernels, biases, strict=True)
    ]


def _parts_fwd(x, kernels, bias, spec):
    return _parts(x, kernels, bias, spec), (x, kernels, bias)


def _parts_bwd(spec, residuals, dys):
    """Return the gradients of `x`, the kernels and the bias.

    On GPUs, cuBLAS adds up the gradient of `x` within the products.
    """
    x, kernels, bias = residuals
    dx = None
    dkernels = []
    for kernel, dy in zip(kernels, dys, strict=True):
        dx_part, dkernel, _ = _linear_bwd(spec, (x, None, kernel, None), dy)
        # XLA fuses the addition into the product only in this order.
        dx = dx_part if dx is None else dx_part + dx
        dkernels.append(dkernel)
    if bias is None:
        return dx, dkernels, None
    rows = x.ndim - 1
    if spec.variants.two_stage_sums:
        dbias = sum_rows(jnp.stack(dys, rows), rows, spec.variants)
    else:
        dbias = jnp.stack([bias_gradient(dy, rows, spec.variants) for dy in dys])
    return dx, dkernels, dbias.astype(bias.dtype)


_parts.defvjp(_parts_fwd, _parts_bwd)


def dot(
    a: Array, b: Array, axes_a: Axes, axes_b: Axes, dtype: DTypeLike = jnp.float32
) -> Array:
    """Contract axes of `a` with axes of `b`, accumulating in float32.

    The result has the remaining axes of `a`, then the remaining axes of `b`, and the given dtype.
    """
    dimensions = ((tuple(axes_a), tuple(axes_b)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=dtype)


def sum_rows(x: Array, num_rows: int, variants: Variants) -> Array:
    """Return the sum of `x` over its first `num_rows` axes, in float32.

    XLA:GPU needs two kernels for such a sum. With the variant `two_stage_sums`, the first kernel
    computes 16 partial sums, and is often fused with the operation that computes `x`. The second
    is fused into the operation that reads the sum. If the number of terms is not a multiple of 16,
    the variant has no effect.
    """
    rows = math.prod(x.shape[:num_rows])
    if not variants.two_stage_sums or rows % _NUM_PARTIAL_SUMS:
        return x.sum(tuple(range(num_rows)), dtype=jnp.float32)
    shape = (_NUM_PARTIAL_SUMS, rows // _NUM_PARTIAL_SUMS, *x.shape[num_rows:])
    parts = x.astype(jnp.float32).reshape(shape).sum(1)
    parts = jax.lax.optimization_barrier(parts)  # XLA would merge both stages
    sums = [parts[part] for part in range(_NUM_PARTIAL_SUMS)]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def bias_gradient(dy: Array, num_rows: int, variants: Variants) -> Array:
    """Return the gradient of a bias: the sum of `dy` over its first `num_rows` axes."""
    rounds = dy.dtype == jnp.float32 and variants.rounds_float32
    if not variants.bias_gradient_by_product or rounds:
        return sum_rows(dy, num_rows, variants)
    ones = jnp.ones((2, *dy.shape[:num_rows]), dy.dtype)
    sums = dot(ones, dy, range(1, num_rows + 1), range(num_rows))
    return sums[0]


# GELU's tanh form (Hendrycks and Gimpel 2016, section 2): x (1 + tanh u) / 2 = x / (1 + exp(-2 u))
# with u = sqrt(2 / pi) (x + 0.044715 x^3). The backward rule reads the quotient y again, so XLA:CPU
# stores y instead of recomputing it at each use (docs/performance.md, XLA:CPU note 2).
_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715


def _exp_minus_2u(x):
    # For x far below 0 this overflows to infinity, and x divided by infinity is -0, as required.
    return jnp.exp(-_SLOPE * (x + _CUBIC * x**3))


def _gelu_fwd(x):
    # `linear` calls this function in its own backward pass, so y is not stored between the forward
    # and the backward pass.
    x32 = x.astype(jnp.float32)
    y = x32 / (1.0 + _exp_minus_2u(x32))
    return y.astype(x.dtype), (x, y)


def _gelu_bwd(residuals, dy):
    x, y = residuals
    x32 = x.astype(jnp.float32)
    sigmoid = 1.0 / (1.0 + _exp_minus_2u(x32))
    slope_of_2u = _SLOPE * (1.0 + 3.0 * _CUBIC * x32**2)
    # The order of the factors matters: y (1 - sigmoid) becomes 0 before a large slope can make the
    # product infinite.
    dx = dy.astype(jnp.float32) * (sigmoid + y * (1.0 - sigmoid) * slope_of_2u)
    return (dx.astype(x.dtype),)


@jax.custom_vjp
def gelu_tanh(x: Array) -> Array:
    """Compute `plain.gelu_tanh` with a hand-written backward rule."""
    return _gelu_fwd(x)[0]


gelu_tanh.defvjp(_gelu_fwd, _gelu_bwd)
