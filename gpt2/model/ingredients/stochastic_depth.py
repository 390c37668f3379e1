"""Stochastic depth: in training, each residual branch is dropped for some of the sequences.

Huang et al. 2016, arXiv 1603.09382. Of L layers, layer l drops its branches with the probability
p * l / L, where p is `model.stochastic_depth` (the linear decay rule, equation 4). Each sequence
and each branch has its own mask, as with "drop path" in vision transformers. The outputs of
the branches that remain are divided by the probability of remaining, so that evaluation can use all
branches without a factor.
"""

import flax.linen as nn
import jax
from jax import Array

from gpt2.model.seams import Branch, Context, Ingredient


class StochasticDepth(Ingredient):
    """The ingredient `model.stochastic_depth`: branches are dropped at random in training."""

    option = "stochastic_depth"

    def branch(self, block: nn.Module, branch: Branch, context: Context) -> Branch:
        """In training, return a branch whose output is 0 for a random part of the sequences."""
        if context.deterministic:
            return branch
        number = context.layer + 1
        keep_rate = 1 - self.config.stochastic_depth * number / self.config.num_layers

        def dropout(y: Array) -> Array:
            key = block.make_rng("dropout")
            keep = jax.random.bernoulli(key, keep_rate, (len(y), 1, 1))
            factor = keep / keep_rate
            return branch.dropout(y * factor.astype(y.dtype))

        return branch._replace(dropout=dropout)
