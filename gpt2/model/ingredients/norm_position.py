"""Norms elsewhere than before a branch.

post: after the sum (Vaswani et al. 2017), and none at the end; sandwich: before and after the
branch (Gemma 2, arXiv 2408.00118), two more norms in each layer.
"""

import flax.linen as nn

from gpt2.config import GPTConfig
from gpt2.model.ingredients.base import Branch, Flow, Ingredient
from gpt2.model.layers import Norm


class NormPosition(Ingredient):
    """`model.norm_position`."""

    option = "norm_position"

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.keeps_final_norm = config.norm_position != "post"

    def branch(
        self, block: nn.Module, number: int, branch: Branch, flow: Flow
    ) -> Branch:
        """Moves the norm behind the sum, or puts one before it."""
        if self.config.norm_position == "post":
            return branch._replace(
                norm=lambda read: read, add=lambda y: branch.norm(branch.add(y))
            )
        after = Norm(self.config, block.ops, name=f"ln_{number}_post")
        return branch._replace(drop=lambda y: branch.drop(after(y)))
