"""Independent tools for training in JAX, one in each file."""
