"""Types of the values that pass through JAX's transformations."""

from typing import Any

from jax import Array

# A pytree of arrays, shapes or shardings, such as nested dicts of parameters.
Tree = Any

# Arrays [B, T] by name: `tokens`, `targets`, optionally `segments`, ...
Batch = dict[str, Array]
Sums = dict[str, tuple[Array, Array]]  # name -> (sum, count), float32 scalars
