"""Slower turns for contexts longer than those that a model with rope was trained on.

Frequencies that make few turns in `model.rope_context` tokens are divided by `model.rope_factor`,
those that make many are kept. llama3: Grattafiori et al. 2024, arXiv 2407.21783, and Meta's code;
yarn: Peng et al. 2023, arXiv 2309.00071, which lengthens vectors too, so that scores spread less
over more tokens. No cost.
"""

import math

import jax.numpy as jnp
from jax import Array

from gpt2.model.ingredients.base import Ingredient


class RopeScaling(Ingredient):
    """`model.rope_scaling`, with `rope_factor` and `rope_context`."""

    option = "rope_scaling"

    def frequencies(self, frequencies: Array) -> tuple[Array, float]:
        """Returns slower ones, and the factor of vectors' lengths."""
        factor = self.config.rope_factor
        kept = self._share_kept(frequencies)
        frequencies = kept * frequencies + (1 - kept) * frequencies / factor
        length = (
            0.1 * math.log(factor) + 1 if self.config.rope_scaling == "yarn" else 1.0
        )
        return frequencies, length

    def _share_kept(self, frequencies: Array) -> Array:
        """Returns how much of each is kept, between 0 for few turns and 1 for many."""
        half = len(frequencies)
        base = self.config.rope_base
        context = self.config.rope_context
        if self.config.rope_scaling == "llama3":  # from 1 turn to 4
            share = (context * frequencies / (2 * math.pi) - 1) / (4 - 1)
            return jnp.clip(share, 0, 1)
        # From 32 turns to 1, and linear in the dimension, as in the paper's code.
        many = half * math.log(context / (2 * math.pi * 32), base)
        one = half * math.log(context / (2 * math.pi), base)
        first = max(math.floor(many), 0)
        last = min(math.ceil(one), 2 * half - 1)
        share = 1 - (jnp.arange(half) - first) / max(last - first, 0.001)
        return jnp.clip(share, 0, 1)
