"""Linear biases by distance in place of positions (Press et al. 2022, arXiv 2108.12409).

Scores lose a head's slope times how far back a key is. No parameters; attention is its formula.
"""

import math

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from gpt2.config import GPTConfig
from gpt2.model.ingredients.base import Ingredient
from gpt2.ops.plain import ScoreTerm


class Alibi(Ingredient):
    """`model.position=alibi`."""

    option = "position"

    @classmethod
    def is_wanted(cls, config: GPTConfig) -> bool:
        """Returns whether positions are told by biases."""
        return config.position == "alibi"

    def score_terms(self, attention: nn.Module) -> tuple[ScoreTerm, ...]:
        """Returns the biases of all heads."""
        slopes = alibi_slopes(self.config.num_heads)[:, None, None]

        def add_bias(scores: Array, query: Array, key: Array) -> Array:
            return scores + slopes * (key - query)

        return (add_bias,)


def alibi_slopes(num_heads: int) -> Array:
    """Returns the slope of each head, `[N]` float32 (section 3, and the authors' code)."""
    smaller = 2 ** math.floor(math.log2(num_heads))
    places = [i + 1.0 for i in range(smaller)]
    places += [i + 0.5 for i in range(num_heads - smaller)]
    slopes = [2.0 ** (-8.0 * place / smaller) for place in places]
    return jnp.array(slopes, jnp.float32)
