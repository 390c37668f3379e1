"""What passes through JAX's transformations."""

from typing import Any

Tree = Any  # a pytree: of arrays, such as nested dictionaries of parameters, or of their likes
