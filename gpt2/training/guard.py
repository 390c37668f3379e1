"""Skips steps that would spoil a run: those with NaN or Inf.

All is decided on the devices, so that the host need not wait for a loss.
"""

import jax.numpy as jnp
from flax import struct
from jax import Array


class Guard(struct.PyTreeNode):
    """What a run remembers to tell steps that it skips: they change no parameter and no moment."""

    skipped: Array  # int32 scalar, steps so far
    # int32 scalar, steps up to now whose loss or gradients held NaN or Inf, but for overflows of
    # float16. Once it is above `max_bad`, no step changes a parameter or a moment: the state is
    # then looked at.
    bad_in_a_row: Array
    max_bad: int = struct.field(pytree_node=False)  # train.skip_bad_steps

    @classmethod
    def create(cls, max_bad: int) -> "Guard":
        """Return the guard at the start of a run."""
        return cls(jnp.int32(0), jnp.int32(0), max_bad)

    def capped(self) -> "Guard":
        """Return a restored guard with no more bad steps in a row than `max_bad`, now lower."""
        return self.replace(bad_in_a_row=self.bad_in_a_row.clip(max=self.max_bad))

    def judge(self, loss: Array, grad_norm: Array) -> tuple[Array, "Guard"]:
        """Return whether a step may change the state, a boolean scalar, and the next guard."""
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        keep = finite & (self.bad_in_a_row <= self.max_bad)
        in_a_row = jnp.where(keep, 0, self.bad_in_a_row + 1)
        skipped = self.skipped + ~keep
        return keep, self.replace(skipped=skipped, bad_in_a_row=in_a_row)
