"""Attention and MLP read the same input (GPT-J, GPT-NeoX). No cost."""

import flax.linen as nn

from gpt2.model.ingredients.base import Branch, Flow, Ingredient


class ParallelBlock(Ingredient):
    """`model.parallel_block`."""

    option = "parallel_block"

    def branch(
        self, block: nn.Module, number: int, branch: Branch, flow: Flow
    ) -> Branch:
        """Lets both branches read what entered the layer."""
        return branch._replace(read=flow.entered)
