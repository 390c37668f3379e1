"""One step of training and one of evaluation, as pure functions.

The code of a step mentions no device, mesh or file. It sums over the rows of its batch with
`map_sum`, which a backend of `gpt2.parallel` provides: `map_sum(function)(params, batch)` calls
`function(params, rows, device) -> (sums, grads)` for the rows of each device, and adds up both
trees of arrays across all devices, once at the end of the step. There is one exception: with
`parallel.fsdp_gather=layer`, gradients are added up in each layer of each micro-batch.

gpt2/training/losses/next_token.py explains how a batch becomes a loss. The loss returns the sums
`{name: (sum, count)}`. At the end, each sum is divided once by its count, and becomes the metric
`train/NAME` or `eval/NAME`. The gradient of the objective is divided once by the count of
`sums["loss"]`.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax import Array

from gpt2.model.gpt import Params
from gpt2.optim import num_updates
from gpt2.training.losses import LossFn
from gpt2.training.noise_scale import with_noise, with_squares
from gpt2.training.state import TrainState
from gpt2.utils.accumulate import accumulate
from gpt2.utils.prng import dropout_key
from gpt2.utils.trees import Batch, Sums, Tree

Metrics = dict[str, Array]
MapSum = Callable[[Callable], Callable]
Choose = Callable[[Array, Callable, Callable], Tree]


def on_one_device(function: Callable) -> Callable:
    """The `map_sum` of a single device: call `function` once, with all rows."""
    return lambda params, batch: function(params, batch, 0)


def means(sums: Sums, prefix: str) -> Metrics:
    """Return `{prefix + name: sum / count}`, or the sum itself if the count is 0."""
    return {
        prefix + name: total / _divisor(count) for name, (total, count) in sums.items()
    }


def _divisor(count: Array) -> Array:
    # A count may be a sum of weights, and then below 1, so this is not max(count, 1).
    return jnp.where(count > 0, count, 1.0)


class Update(NamedTuple):
    """The results of one optimizer step."""

    state: TrainState
    metrics: Metrics
    grads: Tree  # means over the global batch, before clipping
    updates: Tree  # what the optimizer adds to the parameters


UpdateFn = Callable[[TrainState, Batch, MapSum], Update]


def make_update(
    loss: LossFn,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    seed: int,
    accumulate_steps: int = 1,
    measures_noise: bool = False,
    norm: Callable[[Params], Array] = optax.tree.norm,
    choose: Choose = jax.lax.cond,
) -> UpdateFn:
    """Return a function `update(state, batch, map_sum) -> Update`, which takes an optimizer step.

    The module's docstring explains `map_sum`. Without it, all rows of the batch are on one device.
    If the state has a guard, the guard skips steps with NaN or Inf. A skipped step changes only the
    step count, float16's loss scale and the guard, and the schedule does not count it.

    `optimizer` contains the schedule; `schedule` is the same one, to log the learning rate.
    `measures_noise` adds the gradient's noise and signal to the metrics, which needs several
    micro-batches or devices. `norm(grads)` is the global norm. `choose(condition, f, g)` returns
    `f()` if the condition is true, and otherwise `g()`.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def update(
        state: TrainState, batch: Batch, map_sum: MapSum = on_one_device
    ) -> Update:
        chex.assert_shape(state.step, ())
        chex.assert_type(state.step, int)
        scale = 1.0 if state.loss_scale is None else state.loss_scale.scale

        def sum_gradients(params, rows, device):
            def scaled_loss(params, micro_batch, index):
                key = dropout_key(seed, state.step, index, device)
                objective, sums = loss(params, micro_batch, key, state.step)
                return objective * scale, sums

            gradients: Callable = partial(jax.grad(scaled_loss, has_aux=True), params)
            if measures_noise:
                gradients = with_squares(gradients)
            grads, sums = accumulate(gradients, rows, accumulate_steps)
            return sums, grads

        sums, grads = map_sum(sum_gradients)(state.params, batch)
        with jax.named_scope("optimizer"):
            # Products instead of quotients: XLA:CPU would store a quotient as a second copy of the
            # gradient (docs/performance.md, XLA:CPU note 1).
            inverse = 1.0 / (scale * _divisor(sums["loss"][1]))
            grads = jax.tree.map(lambda g: g * inverse, grads)
            metrics = means(sums, "train/")
            grad_norm = norm(grads)
            if measures_noise:
                metrics = with_noise(metrics, grad_norm, sums["loss"][1], scale)
            accepts, guarded, skip_metrics = _judge(
                state, metrics["train/loss"], grad_norm
            )

            def take():
                # Pass the norm on: within a branch, XLA would compute it again for clipping.
                updates, opt_state = optimizer.update(
                    grads, state.opt_state, state.params, grad_norm=grad_norm
                )
                return optax.apply_updates(state.params, updates), opt_state, updates

            def skip():
                none = jax.tree.map(jnp.zeros_like, state.params)
                return state.params, state.opt_state, none

            new = take() if accepts is None else choose(accepts, take, skip)
            params, opt_state, updates = new
        taken = num_updates(state.opt_state)
        rate = schedule(state.step if taken is None else taken)
        metrics |= skip_metrics
        metrics["train/grad_norm"] = grad_norm
        metrics["train/learning_rate"] = jnp.float32(rate)
        after = guarded.replace(step=state.step + 1, params=params, opt_state=opt_state)
        return Update(after, metrics, grads, updates)

    return update


def make_train_step(
    update: UpdateFn,
) -> Callable[[TrainState, Batch, MapSum], tuple[TrainState, Metrics]]:
    """Return `train_step(state, batch, map_sum=on_one_device) -> (state, metrics)`.

    `update` is what `make_update` returned. Metrics are float32 scalars.
    """

    def train_step(
        state: TrainState, batch: Batch, map_sum: MapSum = on_one_device
    ) -> tuple[TrainState, Metrics]:
        return update(state, batch, map_sum)[:2]

    return train_step


def _judge(
    state: TrainState, loss: Array, grad_norm: Array
) -> tuple[Array | None, TrainState, Metrics]:
    """Decide whether to take a step. Return `(accepts, state, metrics)`.

    `accepts` is a boolean scalar: whether to take the step. If the state has no guard, every step
    is taken, and `accepts` is None. The returned state has a new guard and loss scale, but the old
    parameters. `metrics` contains the guard's counts of skipped steps.
    """
    if state.guard is None:
        return None, state, Metrics()
    accepts, guard = state.guard.judge(loss, grad_norm)
    loss_scale = state.loss_scale
    if loss_scale is not None:
        is_finite = jnp.isfinite(grad_norm)
        # While the loss scale can be lowered, an overflow is blamed on the scale and not on the
        # batch, so the guard does not count it.
        overflows = jnp.isfinite(loss) & ~is_finite & (loss_scale.scale > 1)
        guard = _select(overflows, state.guard, guard)
        updated = loss_scale.update(is_finite)
        loss_scale = _select(overflows | accepts, updated, loss_scale)
    skip_metrics = {
        "train/skipped_steps": jnp.float32(guard.skipped),
        "train/bad_in_a_row": jnp.float32(guard.bad_in_a_row),  # including this step
    }
    return accepts, state.replace(guard=guard, loss_scale=loss_scale), skip_metrics


def select_both(condition: Array, function: Callable, other: Callable) -> Tree:
    """Call both functions. Return the first result if `condition` is true, otherwise the second.

    `jax.lax.cond` would call only one, but a GPU would wait for the host at each branch.
    """
    return _select(condition, function(), other())


def _select(condition: Tree, tree: Tree, other: Tree) -> Tree:
    return jax.tree.map(partial(jnp.where, condition), tree, other)


def make_eval_step(loss: LossFn) -> Callable[[Tree, Batch, MapSum], Sums]:
    """Return `eval_step(params, batch, map_sum=on_one_device) -> {name: (sum, count)}`.

    The sums are those of `loss`, over all rows of the batch.
    """

    def eval_step(params: Tree, batch: Batch, map_sum: MapSum = on_one_device) -> Sums:
        def sums(params, rows, device):
            return loss(params, rows)[1], None

        return map_sum(sums)(params, batch)[0]

    return eval_step
