"""Normalisation of the last axis, with its own backward rule.

LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019). The backward pass keeps the input
in its own type and two numbers for each row. It computes the normalised rows again, since reverse
mode would keep them, and their intermediate values, in float32.
"""

from functools import partial

import chex
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from gpt2.ops.forms import forms
from gpt2.ops.narrow import bits, floats


def norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    center: bool = True,
    eps: float = 1e-5,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Divides rows by their root mean square, and multiplies by `scale`.

    Args:
        x: `[..., D]`, any float type; statistics and arithmetic are in float32.
        scale: `[D]`.
        bias: `[D]`, added at the end.
        center: subtract the mean first, which makes it LayerNorm.
        eps: added to the mean square.
        dtype: of the result; that of `x` if not given.

    Returns:
        `[..., D]` in `dtype`.
    """
    _check_shapes(x, scale, bias)
    return _norm(x, scale, bias, center, eps, x.dtype, jnp.dtype(dtype or x.dtype))


def norm_reference(x, scale, bias=None, *, center=True, eps=1e-5, dtype=None):
    """Computes `norm` with the derivative left to JAX."""
    _check_shapes(x, scale, bias)
    y = x.astype(jnp.float32)
    if center:
        y -= y.mean(axis=-1, keepdims=True)
    y *= jax.lax.rsqrt(jnp.square(y).mean(axis=-1, keepdims=True) + eps)
    y *= scale
    return (y if bias is None else y + bias).astype(dtype or x.dtype)


def _check_shapes(x, scale, bias):
    """Rows of floats, and vectors as wide: another shape would broadcast."""
    chex.assert_type(x, float)
    chex.assert_shape([scale] if bias is None else [scale, bias], x.shape[-1:])


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _norm(x, scale, bias, center, eps, input_dtype, dtype):
    return _norm_fwd(x, scale, bias, center, eps, input_dtype, dtype)[0]


def _norm_fwd(x, scale, bias, center, eps, input_dtype, dtype):
    x32 = x.astype(jnp.float32)
    mean = x32.mean(axis=-1, keepdims=True) if center else 0.0
    if forms().one_pass:
        # Relative to a value of the row, or a large mean would leave no digits for the variance.
        near = x32 - x32[..., :1] if center else x32
        variance = jnp.square(near).mean(axis=-1, keepdims=True)
        if center:
            variance -= jnp.square(near.mean(axis=-1, keepdims=True))
        variance = jnp.maximum(variance, 0.0)  # rounding
    else:
        variance = jnp.square(x32 - mean).mean(axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(variance + eps)
    y = (x32 - mean) * inverse * scale
    y = (y if bias is None else y + bias).astype(dtype)
    return y, (bits(x), scale, bias, mean, inverse)


def _norm_bwd(center, eps, input_dtype, dtype, residuals, dy):
    x, scale, bias, mean, inverse = residuals
    # The barrier makes XLA compute the normalised rows again, not keep the forward pass's
    # (docs/performance.md, XLA:CPU note 5).
    x, dy = jax.lax.optimization_barrier((x, dy))
    x = floats(x, input_dtype)
    normed = (x.astype(jnp.float32) - mean) * inverse
    dy = dy.astype(jnp.float32)
    dnormed = dy * scale
    dx = dnormed - normed * (dnormed * normed).mean(axis=-1, keepdims=True)
    if center:
        dx -= dnormed.mean(axis=-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    dscale = (dy * normed).sum(rows).astype(scale.dtype)
    dbias = None if bias is None else dy.sum(rows).astype(bias.dtype)
    return (dx * inverse).astype(x.dtype), dscale, dbias


_norm.defvjp(_norm_fwd, _norm_bwd)
