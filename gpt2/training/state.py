"""The state that a training step takes and returns, as one immutable pytree."""

import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from gpt2.optim import averaged_params
from gpt2.training.guard import Guard
from gpt2.utils.trees import Tree


class LossScale(struct.PyTreeNode):
    """Dynamic loss scaling for float16 (Micikevicius et al. 2018, section 3.2)."""

    scale: Array  # float32 scalar that multiplies the loss
    # int32 scalar, steps with finite gradients since `scale` last changed
    good_steps: Array

    GROWTH_INTERVAL = 2000

    @classmethod
    def create(cls) -> "LossScale":
        """Return the scale at the start of training."""
        return cls(jnp.float32(2.0**12), jnp.int32(0))

    def update(self, finite: Array) -> "LossScale":
        """Return the scale after a step. `finite` states whether the step's gradients were finite.

        The scale is halved after an overflow, and doubled after `GROWTH_INTERVAL` steps in a row
        with finite gradients. It remains between 1 and 2^24.
        """
        grown = finite & (self.good_steps + 1 >= self.GROWTH_INTERVAL)
        scale = jnp.where(
            finite, jnp.where(grown, self.scale * 2, self.scale), self.scale / 2
        )
        good_steps = jnp.where(finite & ~grown, self.good_steps + 1, 0)
        return LossScale(jnp.clip(scale, 1.0, 2.0**24), good_steps)


class TrainState(struct.PyTreeNode):
    """The state of training after `step` optimizer steps."""

    step: Array  # int32 scalar
    params: Tree  # plain nested dictionaries
    opt_state: optax.OptState
    loss_scale: LossScale | None  # only with float16, which also has a guard
    guard: Guard | None = None  # for `train.skip_bad_steps` and float16

    @classmethod
    def create(
        cls,
        params: Tree,
        optimizer: optax.GradientTransformation,
        compute_dtype: str,
        skip_bad_steps: int = 0,
    ) -> "TrainState":
        """Return the state before the first step.

        The state has a guard, which skips steps with NaN or Inf, if `skip_bad_steps` is above 0 or
        `compute_dtype` is `float16`. With `float16`, it also has a loss scale.
        """
        overflows = compute_dtype == "float16"
        return cls(
            step=jnp.int32(0),
            params=params,
            opt_state=optimizer.init(params),
            loss_scale=LossScale.create() if overflows else None,
            guard=Guard.create(skip_bad_steps) if skip_bad_steps or overflows else None,
        )

    @property
    def eval_params(self) -> Tree:
        """The parameters to validate, sample and export: `params`, or the optimizer's average."""
        return averaged_params(self.opt_state, self.params)
