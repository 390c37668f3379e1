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
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from gpt2.config import LossConfig
from gpt2.model import GPT
from gpt2.optim import num_updates
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


def make_train_step(
    model: GPT,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    seed: int,
    accumulate_steps: int = 1,
    loss: LossConfig = LossConfig(),
) -> Callable[[TrainState, Batch, MapSum], tuple[TrainState, Metrics]]:
    """Returns `train_step(state, batch, map_sum=on_one_device) -> (state, metrics)`.

    A batch holds `tokens` and `targets` [B, T] int32 (-1: no target) and may hold `segments`.
    Losses and gradients are summed with their token counts and divided once, so the result is the
    mean over the global batch, whatever the layout. Under float16, a step whose gradients are not
    finite changes only the loss scale and the step count; the schedule does not advance.

    Metrics, float32 scalars: `train/loss` (nats per token, with what `loss` adds),
    `train/grad_norm` (before clipping) and `train/learning_rate` (as this step applied it).
    """
    dropout = model.config.dropout > 0

    def train_step(
        state: TrainState, batch: Batch, map_sum: MapSum = on_one_device
    ) -> tuple[TrainState, Metrics]:
        chex.assert_shape(state.step, ())
        chex.assert_type(state.step, int)
        scale = 1.0 if state.loss_scale is None else state.loss_scale.scale

        def sum_gradients(params, rows, device):
            def loss_and_count(params, micro_batch, index):
                params = gathered_for(params, micro_batch)
                keys = {"dropout": dropout_key(seed, state.step, index, device)} if dropout else {}
                total, count = _loss(model, params, micro_batch, not dropout, keys, loss)
                return total * scale, count

            gradients = partial(jax.value_and_grad(loss_and_count, has_aux=True), params)
            return accumulate(gradients, rows, accumulate_steps)

        (total, count), grads = map_sum(sum_gradients)(state.params, batch)
        with jax.named_scope("optimizer"):
            divisor = scale * jnp.maximum(count, 1.0)
            inverse = 1.0 / divisor  # a product is not stored: docs/performance.md, XLA:CPU note 1
            grads = jax.tree.map(lambda g: g * inverse, grads)
            grad_norm = optax.tree.norm(grads)
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        new_state = state.replace(params=params, opt_state=opt_state)
        if state.loss_scale is not None:
            finite = jnp.isfinite(grad_norm)
            new_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new_state, state)
            new_state = new_state.replace(loss_scale=state.loss_scale.update(finite))
        metrics = {
            "train/loss": total / divisor,
            "train/grad_norm": grad_norm,
            "train/learning_rate": jnp.float32(schedule(num_updates(state.opt_state))),
        }
        return new_state.replace(step=state.step + 1), metrics

    return train_step


def make_eval_step(model: GPT) -> Callable[[Any, Batch, MapSum], Metrics]:
    """Returns `eval_step(params, batch, map_sum=on_one_device) -> metrics`.

    Metrics, float32 scalars: `loss_sum` in nats and `count` of targets, over the global batch.
    """
    model = GPT(dataclasses.replace(model.config, logits_dtype="float32"))

    def eval_step(params: Any, batch: Batch, map_sum: MapSum = on_one_device) -> Metrics:
        def sum_loss(params, rows, device):
            total, count = _loss(model, params, rows, deterministic=True, keys={})
            return {"loss_sum": total, "count": count}, None

        return map_sum(sum_loss)(params, batch)[0]

    return eval_step


def _loss(model, params, batch, deterministic, keys, loss=LossConfig()):
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
    )
