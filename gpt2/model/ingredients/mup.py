"""Rates and scales that stay right at other widths (Yang et al. 2022, arXiv 2203.03466, table 8).

`model.mup_base_width` is the width at which rates were tuned. Here are the standard deviation of
kernels, attention's scale and the head's multiplier; gpt2/optim has the rates. No cost.
"""

import flax.linen as nn
from jax import Array

from gpt2.model.ingredients.base import Flow, Ingredient
from gpt2.model.layers import Linear


class MuP(Ingredient):
    """`model.mup_base_width`."""

    option = "mup_base_width"

    @property
    def width_ratio(self) -> float:
        """Width over its base."""
        return self.config.embed_dim / self.config.mup_base_width

    def stddev(self, stddev: float, linear: Linear) -> float:
        """Divides it by the root of the width over its base."""
        return stddev / self.width_ratio**0.5

    def scale(self, scale: float) -> float:
        """Returns 8 / H in place of 1 / sqrt(H): equal at heads of 64 (section 4)."""
        return 8.0 / self.config.head_size

    def normed(self, gpt: nn.Module, x: Array, flow: Flow) -> Array:
        """Divides what the head reads by the width over its base."""
        return x / self.width_ratio
