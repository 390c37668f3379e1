"""Independent tools of training in JAX, one in each file."""
