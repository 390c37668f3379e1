"""Skip training steps whose loss or gradients contain NaN or Inf.

The devices decide, so that the host does not have to wait for the loss.
"""

import jax.numpy as jnp
from flax import struct
from jax import Array


class Guard(struct.PyTreeNode):
    """Counts of skipped steps. A skipped step changes neither parameters nor optimizer state.

    Overflows of float16 are not counted while the loss scale can be lowered.
    """

    skipped: Array  # int32 scalar, skipped steps so far
    # int32 scalar, the number of consecutive skipped steps up to the newest. If it exceeds
    # `max_bad`, the run ends. The devices skip all steps until the host notices, so that the
    # diagnosis can use the state before the bad step.
    bad_in_a_row: Array
    max_bad: int = struct.field(pytree_node=False)  # the value of train.skip_bad_steps

    @classmethod
    def create(cls, max_bad: int) -> "Guard":
        """Return the guard at the start of a run."""
        return cls(jnp.int32(0), jnp.int32(0), max_bad)

    def capped(self) -> "Guard":
        """Return a restored guard, with `bad_in_a_row` reduced to `max_bad` if it is larger.

        Without the reduction, a run that continues with a smaller `max_bad` would skip every step.
        """
        return self.replace(bad_in_a_row=self.bad_in_a_row.clip(max=self.max_bad))

    def judge(self, loss: Array, grad_norm: Array) -> tuple[Array, "Guard"]:
        """Return `(keep, guard)`: whether a step may change the state, and the guard after it.

        `keep` is a boolean scalar. It is False if `loss` or `grad_norm` is not finite, and at all
        steps after more than `max_bad` skipped steps in a row.
        """
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        keep = finite & (self.bad_in_a_row <= self.max_bad)
        in_a_row = jnp.where(keep, 0, self.bad_in_a_row + 1)
        skipped = self.skipped + ~keep
        return keep, self.replace(skipped=skipped, bad_in_a_row=in_a_row)
