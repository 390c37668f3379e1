"""Skips the steps whose loss or gradients hold NaN or Inf.

The devices decide, so the host does not wait for a loss.
"""

import jax.numpy as jnp
from flax import struct
from jax import Array


class Guard(struct.PyTreeNode):
    """Counts of skipped steps. A skipped step changes no parameter and no optimizer moment."""

    skipped: Array  # int32 scalar, skipped steps so far
    # int32 scalar, the newest steps in a row that were skipped, without overflows of float16. Once
    # it exceeds `max_bad`, all steps are skipped, so that the diagnosis finds the state unchanged.
    bad_in_a_row: Array
    max_bad: int = struct.field(pytree_node=False)  # train.skip_bad_steps

    @classmethod
    def create(cls, max_bad: int) -> "Guard":
        """Return the guard at the start of a run."""
        return cls(jnp.int32(0), jnp.int32(0), max_bad)

    def capped(self) -> "Guard":
        """Return a restored guard with at most `max_bad` bad steps in a row."""
        return self.replace(bad_in_a_row=self.bad_in_a_row.clip(max=self.max_bad))

    def judge(self, loss: Array, grad_norm: Array) -> tuple[Array, "Guard"]:
        """Return whether the step may change the state, a boolean scalar, and the next guard."""
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        keep = finite & (self.bad_in_a_row <= self.max_bad)
        in_a_row = jnp.where(keep, 0, self.bad_in_a_row + 1)
        skipped = self.skipped + ~keep
        return keep, self.replace(skipped=skipped, bad_in_a_row=in_a_row)
