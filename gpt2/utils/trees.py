"""The type of what passes through JAX's transformations."""

from typing import Any

from jax import Array

# A pytree of arrays, shapes or shardings, such as nested dicts of parameters.
Tree = Any

Batch = dict[str, Array]  # arrays [B, T] by name: tokens, targets, maybe segments, ...
Sums = dict[str, tuple[Array, Array]]  # a sum and a count by name, float32 scalars
