"""One step of training and one of evaluation, as pure functions.

A step knows of no device, mesh or file. It sums over the rows that it is given, through `map_sum`,
which a backend of `gpt2.parallel` provides. `map_sum(function)(params, batch)` calls
`function(params, rows, device) -> (sums, grads)` for the rows of every device that splits the
batch. It adds up the results once, across all devices. `sums` is a tree of scalars, and `grads` is
a tree like `params`, or None.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from gpt2.config import LossConfig
from gpt2.model import GPT
from gpt2.ops.forms import either
from gpt2.optim import global_norm, num_updates
from gpt2.parallel.rules import gathered_for
from gpt2.training.state import TrainState
from gpt2.utils.accumulate import accumulate
from gpt2.utils.prng import dropout_key

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
MapSum = Callable[[Callable], Callable]


def on_one_device(function: Callable) -> Callable:
    """Maps as `map_sum` does, for a single device: all rows in one call, nothing to add."""
    return lambda params, batch: function(params, batch, 0)


class Update(NamedTuple):
    """What one optimizer step computes.

    Attributes:
        state: after the step.
        metrics: see `make_train_step`.
        grads: mean gradients of the global batch, before clipping, a tree like the parameters.
        updates: what the optimizer adds to the parameters, a tree like them.
    """

    state: TrainState
    metrics: Metrics
    grads: Any
    updates: Any


def make_update(
    model: GPT,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    seed: int,
    accumulate_steps: int = 1,
    loss: LossConfig = LossConfig(),
) -> Callable[[TrainState, Batch, MapSum], Update]:
    """Returns `update(state, batch, map_sum=on_one_device) -> Update`.

    A batch holds `tokens` and `targets` [B, T] int32 (-1: no target) and may hold `segments`.
    Losses and gradients are summed with their token counts and divided once, so the result is the
    mean over the global batch, whatever the layout. A step that is left out changes only the step
    count and what tells such steps: the loss scale of float16, or the guard. The schedule does not
    advance.
    """
    dropout = model.config.dropout > 0
    optimizer = optax.with_extra_args_support(optimizer)

    def update(state: TrainState, batch: Batch, map_sum: MapSum = on_one_device) -> Update:
        chex.assert_shape(state.step, ())
        chex.assert_type(state.step, int)
        scale = 1.0 if state.loss_scale is None else state.loss_scale.scale

        def sum_gradients(params, rows, device):
            def loss_and_count(params, micro_batch, index):
                params = gathered_for(params, micro_batch)
                keys = {"dropout": dropout_key(seed, state.step, index, device)} if dropout else {}
                total, count = model_loss(model, params, micro_batch, not dropout, keys, loss)
                return total * scale, count

            gradients = partial(jax.value_and_grad(loss_and_count, has_aux=True), params)
            return accumulate(gradients, rows, accumulate_steps)

        (total, count), grads = map_sum(sum_gradients)(state.params, batch)
        with jax.named_scope("optimizer"):
            divisor = scale * jnp.maximum(count, 1.0)
            inverse = 1.0 / divisor  # a product is not stored: docs/performance.md, XLA:CPU note 1
            grads = jax.tree.map(lambda g: g * inverse, grads)
            mean_loss, grad_norm = total / divisor, global_norm(grads)
            keep, judged, about_skips = _judge(state, mean_loss, grad_norm)

            def take() -> tuple[Any, Any, Any]:
                # Within a branch, XLA would not see that a clip takes the norm again.
                updates, opt_state = optimizer.update(
                    grads, state.opt_state, state.params, grad_norm=grad_norm
                )
                return optax.apply_updates(state.params, updates), opt_state, updates

            def leave_out() -> tuple[Any, Any, Any]:
                return state.params, state.opt_state, jax.tree.map(jnp.zeros_like, state.params)

            params, opt_state, updates = take() if keep is None else either(keep, take, leave_out)
        metrics = {
            "train/loss": mean_loss,
            "train/grad_norm": grad_norm,
            "train/learning_rate": jnp.float32(schedule(num_updates(state.opt_state))),
        }
        new_state = judged.replace(step=state.step + 1, params=params, opt_state=opt_state)
        return Update(new_state, metrics | about_skips, grads, updates)

    return update


def make_train_step(
    model: GPT,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    **options: Any,
) -> Callable[[TrainState, Batch, MapSum], tuple[TrainState, Metrics]]:
    """Returns `train_step(state, batch, map_sum=on_one_device) -> (state, metrics)`.

    Metrics, float32 scalars: `train/loss` (nats per token, with what `loss` adds),
    `train/grad_norm` (before clipping) and `train/learning_rate` (of this step, left out or not).
    Where steps may be left out, also `bad_in_a_row` (steps up to this one that were not finite,
    with float16 only those for which the loss scale is not to blame). With a guard, also
    `train/skipped_steps` (so far) and `skipped` (1 if this one is left out).

    Args:
        model, optimizer, schedule, **options: as for `make_update`, which tells what a step does.
    """
    update = make_update(model, optimizer, schedule, **options)

    def train_step(
        state: TrainState, batch: Batch, map_sum: MapSum = on_one_device
    ) -> tuple[TrainState, Metrics]:
        new_state, metrics, _, _ = update(state, batch, map_sum)
        return new_state, metrics

    return train_step


def _judge(
    state: TrainState, loss: jax.Array, grad_norm: jax.Array
) -> tuple[jax.Array | None, TrainState, Metrics]:
    """Returns whether to take a step, None for always, `state` that knows of it, and metrics."""
    keep: jax.Array | None = None
    overflows: Any = False
    about_skips: Metrics = {}
    loss_scale = state.loss_scale
    if loss_scale is not None:
        keep = finite = jnp.isfinite(grad_norm)
        # A scale that cannot be lowered is not to blame.
        overflows = jnp.isfinite(loss) & ~finite & (loss_scale.scale > 1)
        is_bad = ~overflows & ~(finite & jnp.isfinite(loss))
        about_skips = {"bad_in_a_row": is_bad.astype(jnp.float32)}
        loss_scale = loss_scale.update(finite)
    if state.guard is not None:
        keep, judged = state.guard.judge(loss, grad_norm)  # it keeps no step that overflows
        guard = _choose(overflows, state.guard, judged)
        loss_scale = _choose(overflows | keep, loss_scale, state.loss_scale)
        about_skips = {
            "train/skipped_steps": guard.skipped,
            "skipped": guard.skipped - state.guard.skipped,
            "bad_in_a_row": guard.bad_in_a_row,
        }
        about_skips = {name: jnp.float32(value) for name, value in about_skips.items()}
        state = state.replace(guard=guard)
    return keep, state.replace(loss_scale=loss_scale), about_skips


def _choose(condition: Any, tree: Any, other: Any) -> Any:
    return jax.tree.map(partial(jnp.where, condition), tree, other)


def make_eval_step(model: GPT) -> Callable[[Any, Batch, MapSum], Metrics]:
    """Returns `eval_step(params, batch, map_sum=on_one_device) -> metrics`.

    Metrics, float32 scalars: `loss_sum` in nats and `count` of targets, over the global batch.
    """
    model = GPT(dataclasses.replace(model.config, logits_dtype="float32"))

    def eval_step(params: Any, batch: Batch, map_sum: MapSum = on_one_device) -> Metrics:
        def sum_loss(params, rows, device):
            total, count = model_loss(model, params, rows, deterministic=True, keys={})
            return {"loss_sum": total, "count": count}, None

        return map_sum(sum_loss)(params, batch)[0]

    return eval_step


def model_loss(
    model: GPT,
    params: Any,
    batch: Batch,
    deterministic: bool,
    keys: dict[str, jax.Array],
    loss: LossConfig = LossConfig(),
    **options: Any,
) -> Any:
    """Returns the summed loss of a batch and its number of targets, as `GPT.loss` does.

    Args:
        model, params: of the run.
        batch: as for `make_update`.
        deterministic: without dropout.
        keys: random keys by purpose.
        loss: what to add to cross-entropy.
        **options: for `GPT.apply`, which may return more.
    """
    chex.assert_rank(batch["tokens"], 2)
    chex.assert_equal_shape(list(batch.values()))
    chex.assert_type(list(batch.values()), int)
    return model.apply(
        {"params": params},
        batch["tokens"],
        batch["targets"],
        segments=batch.get("segments"),
        deterministic=deterministic,
        z_loss=loss.z_loss,
        label_smoothing=loss.label_smoothing,
        rngs=keys,
        method="loss",
        **options,
    )
