"""GPT-2 training in JAX and Flax Linen."""

__version__ = "0.1.0"
