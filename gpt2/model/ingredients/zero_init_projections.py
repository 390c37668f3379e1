"""Each branch's last kernel is 0 at the start (Zhang et al. 2019, Fixup). No cost."""

from gpt2.model.ingredients.base import Ingredient
from gpt2.model.layers import Linear


class ZeroInitProjections(Ingredient):
    """`model.zero_init_projections`."""

    option = "zero_init_projections"

    def stddev(self, stddev: float, linear: Linear) -> float:
        """Returns 0 for a projection."""
        return 0.0 if linear.is_projection else stddev
