"""A learned weighted sum of two arrays."""

import chex
import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from gpt2.config import GPTConfig
from gpt2.model.layers import named_param
from gpt2.ops import Ops
from gpt2.ops.plain import Shape


class Mix(nn.Module):
    """A sum of two arrays with two learned weights, initialised to `init_weights`."""

    config: GPTConfig
    ops: Ops
    init_weights: tuple[float, float]

    @nn.compact
    def __call__(self, x: Array, other: Array) -> Array:
        """Return the weighted sum of two arrays of equal shape, in the compute dtype."""
        chex.assert_equal_shape([x, other])
        weights = named_param(self, "weights", self._init, (2,), ("mix",))
        total = weights[0] * x + weights[1] * other
        return total.astype(self.config.compute_dtype)

    @nn.nowrap
    def _init(self, key: Array, shape: Shape, dtype: str) -> Array:
        return jnp.array(self.init_weights, dtype)
