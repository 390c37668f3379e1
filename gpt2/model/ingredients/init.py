"""Standard deviations of kernels by their shapes.

xavier: Glorot and Bengio 2010; fan_in: LeCun et al. 1998. GPT-2 has `model.init_std` for all.
"""

import math

from gpt2.model.ingredients.base import Ingredient
from gpt2.model.layers import Linear


class Init(Ingredient):
    """`model.init`."""

    option = "init"

    def stddev(self, stddev: float, linear: Linear) -> float:
        """Returns that of the kernel's inputs, or of both sides; queries and keys count once."""
        fan_in = math.prod(linear.shape[: linear.num_contract])
        if self.config.init == "fan_in":
            return fan_in**-0.5
        outputs = zip(linear.shape, linear.axes, strict=True)
        sides = [
            size for size, axis in list(outputs)[linear.num_contract :] if axis != "qkv"
        ]
        return (2.0 / (fan_in + math.prod(sides))) ** 0.5
