"""Skips steps that would spoil a run: those with NaN or Inf, and outliers.

All is decided on the devices, so that the host need not wait for a loss.
"""

import jax
import jax.numpy as jnp
from flax import struct

from gpt2.config import TrainConfig

WINDOW = 128  # steps from which outliers are told, as in OLMo
LEAST = WINDOW // 2  # steps before the first outlier


class Guard(struct.PyTreeNode):
    """What a run remembers to tell steps that it skips: they change no parameter and no moment."""

    skipped: jax.Array  # int32 scalar, steps so far
    # int32 scalar, steps up to now whose loss or gradients held NaN or Inf. Once it is above
    # `max_bad`, no step changes the state, which is then looked at.
    bad_in_a_row: jax.Array
    recent: jax.Array  # float32 [2, WINDOW], losses and gradient norms of the last finite steps
    num_finite: jax.Array  # int32 scalar, steps so far
    max_bad: int = struct.field(pytree_node=False)  # train.skip_bad_steps
    max_z: float = struct.field(pytree_node=False)  # train.skip_outliers

    @classmethod
    def create(cls, train: TrainConfig) -> "Guard | None":
        """Returns the guard at the start of a run, or None if its options skip no step."""
        if not (train.skip_bad_steps or train.skip_outliers):
            return None
        recent = jnp.zeros((2, WINDOW), jnp.float32)
        limits = train.skip_bad_steps, train.skip_outliers
        return cls(jnp.int32(0), jnp.int32(0), recent, jnp.int32(0), *limits)

    def capped(self) -> "Guard":
        """Returns a restored guard with no more bad steps in a row than `max_bad`, now lower."""
        return self.replace(bad_in_a_row=self.bad_in_a_row.clip(max=self.max_bad))

    def judge(self, loss: jax.Array, grad_norm: jax.Array) -> tuple[jax.Array, "Guard"]:
        """Returns whether a step may change the state, a boolean scalar, and the next guard."""
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        goes_on = finite & (self.bad_in_a_row <= self.max_bad)
        step = jnp.stack([loss, grad_norm]).astype(jnp.float32)
        keep = goes_on & ~self._is_outlier(step) if self.max_z else goes_on
        entered = self.recent.at[:, self.num_finite % WINDOW].set(step)
        return keep, self.replace(
            skipped=self.skipped + ~keep,
            bad_in_a_row=jnp.where(goes_on, 0, self.bad_in_a_row + 1),
            recent=jnp.where(finite, entered, self.recent),
            num_finite=self.num_finite + finite,
        )

    def _is_outlier(self, step: jax.Array) -> jax.Array:
        """Returns whether loss or gradient norm [2] stands out above the recent ones.

        This is the rule of OLMo's SkipStepOptimizer (OLMo-core, optim/skip_step_optimizer.py).
        Outliers enter the window too, so that a run cannot skip steps for ever.
        """
        count = jnp.minimum(self.num_finite, WINDOW)
        known = jnp.arange(WINDOW) < count
        mean = jnp.mean(self.recent, axis=1, where=known)
        std = jnp.std(self.recent, axis=1, ddof=1, where=known)
        return (count >= LEAST) & jnp.any(step - mean > self.max_z * std)
