"""The token before each, also before the first of those that a cache adds to."""

import jax.numpy as jnp
from jax import Array

from gpt2.model.ingredients.base import Flow, Ingredient


class PreviousToken(Ingredient):
    """An ingredient that reads the token before each."""

    def before(self, x: Array, last: Array, flow: Flow, missing: int) -> Array:
        """Returns what is a position earlier in `x` `[B, T, ...]`.

        `last` `[B, 1, ...]` is before the first. `missing` stands where a segment begins.
        """
        earlier = jnp.concatenate([last, x[:, :-1]], axis=1)
        exists = flow.positions > 0
        further = (1,) * (x.ndim - 2)
        exists = exists.reshape(*exists.shape, *further)
        return jnp.where(exists, earlier, missing)

    def last_tokens(self, flow: Flow) -> Array:
        """Returns the tokens before the first ones, int32 `[B, 1]`; any where there is none."""
        if flow.last_token is None:
            return flow.tokens[:, :1]
        return flow.last_token[:, None]
