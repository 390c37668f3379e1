"""One step of training and one of evaluation, as pure functions.

A step knows of no device, mesh or file. It sums over the rows that it is given, through `map_sum`,
which a backend of `gpt2.parallel` provides: `map_sum(function)(params, batch)` calls
`function(params, rows, device) -> (sums, grads)` for the rows of every device that splits the
batch, and adds up the results once, across all devices. Both are trees of arrays.

What is summed is what the loss returns: `{name: (sum, count)}`. `sums["loss"]` is cross-entropy,
with the derivative of the whole objective; every name is divided once, at the end, and becomes the
metric `train/NAME` or `eval/NAME`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax import Array

from gpt2.config import LossConfig
from gpt2.model import GPT
from gpt2.model.gpt import Params
from gpt2.model.losses import Weight, loss_ingredients
from gpt2.ops import plain
from gpt2.ops.plain import LogitsLoss, Rows
from gpt2.optim import num_updates
from gpt2.training.state import TrainState
from gpt2.utils.accumulate import accumulate
from gpt2.utils.prng import dropout_key
from gpt2.utils.scan import METRICS, reported
from gpt2.utils.trees import Tree

Batch = dict[str, Array]
Sums = dict[str, tuple[Array, Array]]
Metrics = dict[str, Array]
MapSum = Callable[[Callable], Callable]
LossFn = Callable[..., Sums]
Choose = Callable[[Array, Callable, Callable], Tree]


def next_token_loss(model: GPT, options: LossConfig = LossConfig()) -> LossFn:
    """Returns `loss(params, batch, key=None, step=None) -> {name: (sum, count)}`, float32 scalars.

    `loss` is cross-entropy; other names are those of what `options` add and of what modules
    `report`. train.py may swap this function for another of its signature.
    """
    extras = loss_ingredients(options)

    def loss(
        params: Params,
        batch: Batch,
        key: Array | None = None,
        step: Array | None = None,
    ) -> Sums:
        if unknown := batch.keys() - {"tokens", "targets", "segments"}:
            raise ValueError(f"a batch has {sorted(unknown)}, which nothing reads")
        later: dict[str, tuple[Array, Weight]] = {}
        if step is not None:
            for extra in extras:
                later |= extra.targets(batch["targets"], batch.get("segments"), step)
        rows = batch | {name: targets for name, (targets, _) in later.items()}

        def logits_loss(logits: Array, rows: Rows) -> tuple[Array, Sums]:
            targets = rows["targets"]
            log_normaliser = model.ops.log_sum_exp(logits)
            at_targets = plain.pick(logits, targets)
            found = {"loss": plain.sum_real(log_normaliser - at_targets, targets)}
            objective = found["loss"][0]
            for extra in extras:
                real_logits = logits[..., : model.config.vocab_size]
                term = extra.term(real_logits, log_normaliser, at_targets)
                if term is not None:
                    found[extra.option] = plain.sum_real(term, targets)
                    objective += found[extra.option][0]
            for name, (_, weight) in later.items():
                losses = log_normaliser - plain.pick(logits, rows[name])
                found[name] = plain.sum_real(losses, rows[name])
                objective += weight * found[name][0]
            return objective, found

        return apply_loss(model, params, rows, logits_loss, key)

    return loss


def apply_loss(
    model: GPT,
    params: Params,
    rows: Rows,
    logits_loss: LogitsLoss,
    key: Array | None = None,
) -> Sums:
    """Returns what `logits_loss` finds in a batch, and what modules report: `{name: (sum, count)}`.

    `rows` are a batch and what else the loss reads of its positions. `logits_loss(logits, rows)`
    takes float32 logits `[B, T, V]`, V with padding, and their rows, a part of the positions at a
    time. It returns the objective, and sums by name, of which "loss" is one. Auxiliary losses of
    modules join the objective. With a key there is dropout.
    """
    (objective, found), variables = model.apply(
        {"params": params},
        rows,
        logits_loss,
        deterministic=key is None,
        rngs={} if key is None else {"dropout": key},
        method="loss",
        mutable=[METRICS],
    )
    if METRICS in variables:
        for name, each in reported(variables[METRICS]).items():
            total, count, auxiliary = each
            if name in found:
                raise ValueError(f"a module reports {name!r}, which the loss does")
            found[name] = total, count
            objective += auxiliary
    total, count = found["loss"]
    # The value to log, with the derivative of what a step lowers: the difference is 0.
    total += objective - jax.lax.stop_gradient(objective)
    return found | {"loss": (total, count)}


def on_one_device(function: Callable) -> Callable:
    """Maps as `map_sum` does, for a single device: all rows in one call, nothing to add."""
    return lambda params, batch: function(params, batch, 0)


def means(sums: Sums, prefix: str) -> Metrics:
    """Returns `{prefix + name: sum / count}`; where nothing was counted, the sum."""
    return {
        prefix + name: total / jnp.where(count > 0, count, 1.0)
        for name, (total, count) in sums.items()
    }


class Update(NamedTuple):
    """What one optimizer step computes."""

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
    norm: Callable[[Params], Array] = optax.tree.norm,
    choose: Choose = jax.lax.cond,
) -> UpdateFn:
    """Returns `update(state, batch, map_sum=on_one_device) -> Update`.

    A batch holds `tokens` and `targets` [B, T] int32 (-1: no target) and may hold `segments`. A
    skipped step changes only the step count, float16's loss scale and the guard, not the schedule.
    `norm` is of all gradients together, and `choose` gives one of two results.
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
                sums = loss(params, micro_batch, key, state.step)
                return sums["loss"][0] * scale, sums

            gradients = partial(jax.grad(scaled_loss, has_aux=True), params)
            grads, sums = accumulate(gradients, rows, accumulate_steps)
            return sums, grads

        sums, grads = map_sum(sum_gradients)(state.params, batch)
        with jax.named_scope("optimizer"):
            # A product is not stored: docs/performance.md, XLA:CPU note 1.
            inverse = 1.0 / (scale * jnp.maximum(sums["loss"][1], 1.0))
            grads = jax.tree.map(lambda g: g * inverse, grads)
            metrics = means(sums, "train/")
            grad_norm = norm(grads)
            keep, judged, about_skips = _judge(state, metrics["train/loss"], grad_norm)

            def take():
                # Within a branch, XLA would not see that a clip takes the norm again.
                updates, opt_state = optimizer.update(
                    grads, state.opt_state, state.params, grad_norm=grad_norm
                )
                return optax.apply_updates(state.params, updates), opt_state, updates

            def skip():
                none = jax.tree.map(jnp.zeros_like, state.params)
                return state.params, state.opt_state, none

            new = take() if keep is None else choose(keep, take, skip)
            params, opt_state, updates = new
        taken = num_updates(state.opt_state)
        rate = schedule(state.step if taken is None else taken)
        metrics |= about_skips
        metrics["train/grad_norm"] = grad_norm
        metrics["train/learning_rate"] = jnp.float32(rate)
        after = judged.replace(step=state.step + 1, params=params, opt_state=opt_state)
        return Update(after, metrics, grads, updates)

    return update


def make_train_step(
    update: UpdateFn,
) -> Callable[[TrainState, Batch, MapSum], tuple[TrainState, Metrics]]:
    """Returns `train_step(state, batch, map_sum=on_one_device) -> (state, metrics)`.

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
    """Returns whether to take a step, None for always, `state` that knows of it, and metrics."""
    if state.guard is None:
        return None, state, Metrics()
    keep, guard = state.guard.judge(loss, grad_norm)
    loss_scale = state.loss_scale
    if loss_scale is not None:
        is_finite = jnp.isfinite(grad_norm)
        # The batch is not to blame, unless the scale cannot be lowered.
        overflows = jnp.isfinite(loss) & ~is_finite & (loss_scale.scale > 1)
        guard = _choose(overflows, state.guard, guard)
        updated = loss_scale.update(is_finite)
        loss_scale = _choose(overflows | keep, updated, loss_scale)
    about_skips = {
        "train/skipped_steps": jnp.float32(guard.skipped),
        "train/bad_in_a_row": jnp.float32(guard.bad_in_a_row),  # up to this one
    }
    return keep, state.replace(guard=guard, loss_scale=loss_scale), about_skips


def compute_both(condition: Array, function: Callable, other: Callable) -> Tree:
    """Does as `jax.lax.cond`, without a branch, for which a GPU would wait for the host."""
    return _choose(condition, function(), other())


def _choose(condition: Tree, tree: Tree, other: Tree) -> Tree:
    return jax.tree.map(partial(jnp.where, condition), tree, other)


def make_eval_step(loss: LossFn) -> Callable[[Tree, Batch, MapSum], Sums]:
    """Returns `eval_step(params, batch, map_sum=on_one_device)`: `loss` over the global batch."""

    def eval_step(params: Tree, batch: Batch, map_sum: MapSum = on_one_device) -> Sums:
        def sums(params, rows, device):
            return loss(params, rows), None

        return map_sum(sums)(params, batch)[0]

    return eval_step


def evaluation_loss(model: GPT, others: LossFn | None = None) -> LossFn:
    """Returns the plain cross-entropy of validation: no dropout, logits in float32.

    What the loss `others` gives beside it is given too.
    """
    config = dataclasses.replace(model.config, logits_dtype="float32")
    cross_entropy = next_token_loss(model.clone(config=config))
    if others is None:
        return cross_entropy
    return lambda params, batch: others(params, batch) | cross_entropy(params, batch)
