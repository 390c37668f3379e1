"""Fixed waves in place of learned positions (Vaswani et al. 2017, sections 3.4 and 3.5).

The embedding is scaled too, under muP as at its base width. No parameters.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from gpt2.config import GPTConfig
from gpt2.model.ingredients.base import Flow, Ingredient


class Sinusoidal(Ingredient):
    """`model.position=sinusoidal`."""

    option = "position"

    @classmethod
    def is_wanted(cls, config: GPTConfig) -> bool:
        """Returns whether positions are told by waves."""
        return config.position == "sinusoidal"

    def embedded(self, gpt: nn.Module, x: Array, flow: Flow) -> Array:
        """Adds the waves."""
        from gpt2.model.ingredients import width_ratio  # whose table has this file

        cfg = self.config
        waves = sinusoids(flow.positions, cfg.embed_dim)
        scale = (cfg.embed_dim / width_ratio(cfg)) ** 0.5
        return (x * scale + waves).astype(cfg.compute_dtype)


def sinusoids(positions: Array, width: int) -> Array:
    """Returns waves `[B or 1, T, D]` of positions `[B or 1, T]` int32.

    Sines are in even columns, cosines in odd ones; D is even.
    """
    exponents = jnp.arange(0, width, 2) / width
    frequencies = 10000.0 ** (-exponents)
    angles = positions[..., None] * frequencies
    sines = jnp.sin(angles)
    cosines = jnp.cos(angles)
    waves = jnp.stack([sines, cosines], axis=-1)
    return waves.reshape(*positions.shape, width)
