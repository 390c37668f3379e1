"""Standard deviations of kernels by their shapes, where GPT-2 has `model.init_std` for all.

fan_in: LeCun et al. 1998, section 4.6.
"""

import math

from gpt2.model.ingredients.base import Ingredient
from gpt2.model.layers import Linear


class Init(Ingredient):
    """`model.init`."""

    option = "init"

    def stddev(self, stddev: float, linear: Linear) -> float:
        """Returns one over the root of how many numbers a result is the sum of."""
        fan_in = math.prod(linear.shape[: linear.num_contract])
        return fan_in**-0.5
