"""Normalisation of the last axis, with its own backward rule.

LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019). The backward pass keeps the input
in its own type and two numbers for each row, where reverse mode would keep several float32 arrays.
"""

import chex
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from gpt2.ops.arrays import bits, floats, sum_rows
from gpt2.ops.variants import variants
from gpt2.utils.platform import target


def norm(
    x: jax.Array,  # [..., D], any float type
    scale: jax.Array,  # [D]
    bias: jax.Array | None = None,  # [D]
    *,
    center: bool = True,
    eps: float = 1e-5,
    dtype: DTypeLike | None = None,  # of the result; that of `x` if not given
) -> jax.Array:
    """Divides rows by their root mean square, multiplies by `scale` and adds `bias`, in float32.

    With `center` the mean is subtracted first, which makes it LayerNorm; `eps` joins the square.
    """
    chex.assert_type(x, float)
    chex.assert_shape([scale] if bias is None else [scale, bias], x.shape[-1:])
    if target().plain:
        return norm_reference(x, scale, bias, center=center, eps=eps, dtype=dtype)
    return _norm(x, scale, bias, center, eps, x.dtype, jnp.dtype(dtype or x.dtype))


def norm_reference(x, scale, bias=None, *, center=True, eps=1e-5, dtype=None):
    """Computes `norm` with the derivative left to JAX."""
    y = x.astype(jnp.float32)
    if center:
        y -= y.mean(axis=-1, keepdims=True)
    y *= jax.lax.rsqrt(jnp.square(y).mean(axis=-1, keepdims=True) + eps)
    y *= scale
    return (y if bias is None else y + bias).astype(dtype or x.dtype)


def _norm_fwd(x, scale, bias, center, eps, input_dtype, dtype):
    x32 = x.astype(jnp.float32)
    if center and variants().one_pass:
        mean, variance = _moments(x32)
    else:
        mean = x32.mean(axis=-1, keepdims=True) if center else 0.0
        variance = jnp.square(x32 - mean).mean(axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(variance + eps)
    y = (x32 - mean) * inverse * scale
    y = (y if bias is None else y + bias).astype(dtype)
    return y, (bits(x), scale, bias, mean, inverse)


def _moments(x):
    """Returns mean and variance of rows, `[..., 1]` each, from one pass over `x` `[..., D]`.

    It adds up distances from a row's first element, which is at most sqrt(D) standard deviations
    from the mean: at worst log2(D) bits of the variance are lost, however far from 0 the mean is.
    """
    distance = x - x[..., :1]
    mean, square = (
        y.mean(axis=-1, keepdims=True) for y in (distance, jnp.square(distance))
    )
    return x[..., :1] + mean, square - jnp.square(mean)


def _norm_bwd(center, eps, input_dtype, dtype, residuals, dy):
    x, scale, bias, mean, inverse = residuals
    # The barrier makes XLA compute the normalised rows again (XLA:CPU note 5).
    if variants().norm_joins:
        x = jax.lax.optimization_barrier(x)
    else:
        x, dy = jax.lax.optimization_barrier((x, dy))
    x = floats(x, input_dtype)
    normed = (x.astype(jnp.float32) - mean) * inverse
    dy = dy.astype(jnp.float32)
    dnormed = dy * scale
    dx = dnormed - normed * (dnormed * normed).mean(axis=-1, keepdims=True)
    if center:
        dx -= dnormed.mean(axis=-1, keepdims=True)
    dscale = sum_rows(dy * normed, x.ndim - 1)
    dbias = None if bias is None else sum_rows(dy, x.ndim - 1).astype(bias.dtype)
    return (dx * inverse).astype(x.dtype), dscale.astype(scale.dtype), dbias


_norm = jax.custom_vjp(lambda *args: _norm_fwd(*args)[0], nondiff_argnums=(3, 4, 5, 6))
_norm.defvjp(_norm_fwd, _norm_bwd)
