"""The matrix product of linear maps and of the loss."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from gpt2.ops.forms import forms


def dot(
    a: jax.Array,
    b: jax.Array,
    contract_a: Iterable[int],
    contract_b: Iterable[int],
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """Contracts axes of `a` with axes of `b`, accumulated in float32.

    Returns:
        `[rest of a, rest of b]` in `dtype`.
    """
    dimensions = ((tuple(contract_a), tuple(contract_b)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=dtype)


def result_type(dtype: DTypeLike) -> DTypeLike:
    """Returns the type in which the platform wants results of products that are kept in `dtype`."""
    return dtype if forms().narrow_results else jnp.float32
