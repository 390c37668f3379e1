"""ALiBi: biases of attention's scores, instead of position embeddings (Press et al. 2022).

arXiv 2108.12409. A score is reduced by the head's slope times the distance from the query to the
key. ALiBi has no parameters.
"""

import math

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from gpt2.config import GPTConfig
from gpt2.model.seams import Context, Ingredient
from gpt2.ops.linear_bias import DIMENSIONS, MAX_HEAD_SIZE, MAX_LENGTH
from gpt2.ops.plain import LinearBias, ScoreTerm


class Alibi(Ingredient):
    """The ingredient `model.position=alibi`: a bias of each score, proportional to the distance."""

    option = "position"

    @classmethod
    def is_wanted(cls, config: GPTConfig) -> bool:
        """Return whether `model.position` is `alibi`."""
        return config.position == "alibi"

    def score_terms(
        self, attention: nn.Module, terms: tuple[ScoreTerm, ...], context: Context
    ) -> tuple[ScoreTerm, ...]:
        """Append the function that adds the biases of all heads."""
        return (*terms, LinearBias(alibi_slopes(self.config.num_heads)))

    def has_kernel(self) -> bool:
        """Return whether kernels can compute the biases.

        They can if attention has no soft cap, the head size is at most
        `MAX_HEAD_SIZE - DIMENSIONS`, and 16 bits can represent all positions.
        """
        cfg = self.config
        fits = cfg.head_size + DIMENSIONS <= MAX_HEAD_SIZE
        is_exact = cfg.context_length <= MAX_LENGTH
        return fits and is_exact and not cfg.attention_softcap


def alibi_slopes(num_heads: int) -> Array:
    """Return the slope of each head, `[N]` float32 (Press et al. 2022, section 3)."""
    # The paper defines the slopes for a power of two. As in the authors' code, further heads use
    # every second slope of a model with twice that number of heads.
    power = 2 ** math.floor(math.log2(num_heads))
    steps = [i + 1.0 for i in range(power)]
    steps += [i + 0.5 for i in range(num_heads - power)]
    slopes = [2.0 ** (-8.0 * step / power) for step in steps]
    return jnp.array(slopes, jnp.float32)
