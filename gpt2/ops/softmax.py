"""Softmax whose backward pass keeps its result alone."""

import jax


@jax.custom_vjp
def softmax(x: jax.Array) -> jax.Array:
    """Returns `exp(x) / sum(exp(x))` over the last axis, of the type of `x`.

    It is `jax.nn.softmax` but for what is kept. XLA would keep the exponentials beside the result,
    since it can divide again at little cost: a second array of the size of all scores.
    """
    return jax.nn.softmax(x)


def _softmax_fwd(x):
    y = jax.lax.optimization_barrier(jax.nn.softmax(x))
    return y, y


def _softmax_bwd(y, dy):
    return (y * (dy - (y * dy).sum(-1, keepdims=True)),)


softmax.defvjp(_softmax_fwd, _softmax_bwd)
