"""Activations of the MLP by name, and GELU in its tanh form with its own backward rule.

Hendrycks and Gimpel 2016, section 2: x (1 + tanh u) / 2 = x / (1 + exp(-2 u)) with
u = sqrt(2 / pi) (x + 0.044715 x^3). The backward rule uses the quotient again, so that XLA:CPU
stores it (docs/performance.md, XLA:CPU note 2).
"""

import math
from collections.abc import Callable
from functools import partial

import chex
import jax
import jax.numpy as jnp

from gpt2.utils.platform import target

_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715


def gelu_tanh(x: jax.Array) -> jax.Array:
    """Returns GELU of `x`, elementwise, in the type of `x`; any float type, computed in float32."""
    chex.assert_type(x, float)
    return gelu_tanh_reference(x) if target().plain else _gelu_tanh(x)


def gelu_tanh_reference(x: jax.Array) -> jax.Array:
    """Computes `gelu_tanh` by its formula, with the derivative left to JAX."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


def _exp_minus_2u(x):
    return jnp.exp(
        -_SLOPE * (x + _CUBIC * x**3)
    )  # infinite far below 0; x over it is -0


def _fwd(x):
    # `linear` calls this in its own backward pass, so y lives no longer than that.
    x32 = x.astype(jnp.float32)
    y = x32 / (1.0 + _exp_minus_2u(x32))
    return y.astype(x.dtype), (x, y)


def _bwd(residuals, dy):
    x, y = residuals
    x32 = x.astype(jnp.float32)
    dy32 = dy.astype(jnp.float32)
    sigmoid = 1.0 / (1.0 + _exp_minus_2u(x32))
    slope_of_2u = _SLOPE * (1.0 + 3.0 * _CUBIC * x32**2)
    # In this order, y (1 - sigmoid) is 0 before a large slope can make it infinite.
    dx = dy32 * (sigmoid + y * (1.0 - sigmoid) * slope_of_2u)
    return (dx.astype(x.dtype),)


_gelu_tanh = jax.custom_vjp(lambda x: _fwd(x)[0])
_gelu_tanh.defvjp(_fwd, _bwd)


def relu(x: jax.Array, power: int = 1) -> jax.Array:
    """Returns the positive part of `x`, or its square (So et al. 2021), in the type of `x`."""
    return _power(x, power) if target().plain else _relu(x, power)


def _power(x, power):
    return jnp.maximum(x, 0) if power == 1 else jnp.square(jnp.maximum(x, 0))


def _power_bwd(power, x, dy):
    return (jnp.where(x > 0, dy, 0) if power == 1 else 2 * jnp.maximum(x, 0) * dy,)


# XLA:CPU would compute so cheap a function inside the transposing copy that the gradient of the
# next kernel reads (docs/performance.md, XLA:CPU note 14).
_relu = jax.custom_vjp(_power, nondiff_argnums=(1,))
_relu.defvjp(
    lambda x, power: (jax.lax.optimization_barrier(_power(x, power)), x), _power_bwd
)

# `model.activation` -> the function between the MLP's two linear maps.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu_tanh": gelu_tanh,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "relu": relu,
    "relu_squared": partial(relu, power=2),
    "silu": jax.nn.silu,
}

# `model.activation` -> the function of a third linear map, which multiplies the first one's result.
GATES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "swiglu": jax.nn.silu,
    "geglu": gelu_tanh,
}
