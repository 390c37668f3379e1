"""Single ideas of training in JAX, one a file."""
