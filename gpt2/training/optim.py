"""Optimizers, learning-rate schedules and the weight-decay mask, assembled from optax."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gpt2.config import OptimConfig

# Weight decay applies to parameters of these names. It does not go by the number of dimensions,
# since heads and scanned layers give biases and norm scales more than one.
_DECAYED = ("kernel", "embedding")


def make_schedule(optim: OptimConfig, num_steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the step, counted from 0.

    A linear warm-up reaches `learning_rate` after `warmup_steps` and never gives 0 (nanoGPT's
    form). The schedule that `optim.schedule` names follows. All but `constant` end at
    `end_learning_rate` on step `num_steps`, where the run is longer than its warm-up.
    """
    peak, warmup = optim.learning_rate, optim.warmup_steps
    after = SCHEDULES[optim.schedule](optim, max(num_steps - warmup, 1), num_steps)
    if not warmup:
        return after
    return optax.join_schedules(
        [optax.linear_schedule(peak / (warmup + 1), peak, warmup), after], [warmup]
    )


def make_optimizer(optim: OptimConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Returns the optimizer: clipping by global norm, then the one that `optim.name` names."""
    optimizer = OPTIMIZERS[optim.name](optim, schedule)
    if not optim.clip_norm:
        return optimizer
    return optax.chain(clip_by_global_norm(optim.clip_norm), optimizer)


def _cosine(optim: OptimConfig, steps: int, num_steps: int) -> optax.Schedule:
    """Half a cosine (Loshchilov and Hutter 2017)."""
    peak = optim.learning_rate
    return optax.cosine_decay_schedule(peak, steps, optim.end_learning_rate / peak if peak else 0.0)


def _linear(optim: OptimConfig, steps: int, num_steps: int) -> optax.Schedule:
    return optax.linear_schedule(optim.learning_rate, optim.end_learning_rate, steps)


def _constant(optim: OptimConfig, steps: int, num_steps: int) -> optax.Schedule:
    return optax.constant_schedule(optim.learning_rate)


def _wsd(optim: OptimConfig, steps: int, num_steps: int) -> optax.Schedule:
    """Stable, then a linear decay over the last fifth of all steps (Hu et al. 2024)."""
    decay = min(max(num_steps // 5, 1), steps)
    return optax.linear_schedule(
        optim.learning_rate, optim.end_learning_rate, decay, transition_begin=steps - decay
    )


# `optim.schedule` -> what follows the warm-up: a function of the options, the steps after the
# warm-up and all steps. The schedule counts from the warm-up's end; it is asked for counts below 0
# too, whose answers are dropped. What it cannot work with, it refuses with a UserError.
SCHEDULES = {"cosine": _cosine, "linear": _linear, "constant": _constant, "wsd": _wsd}


def _adamw(optim: OptimConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019)."""
    return optax.adamw(
        schedule,
        b1=optim.beta1,
        b2=optim.beta2,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        mask=decay_mask,
    )


# `optim.name` -> the optimizer, without clipping.
OPTIMIZERS = {"adamw": _adamw}


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Returns `optax.clip_by_global_norm`, computed as a product.

    XLA:CPU would store Optax's quotients: a copy of all gradients (docs/performance.md, XLA:CPU
    note 1).
    """

    def clip(grads: Any, _: Any) -> Any:
        factor = jnp.minimum(1.0, max_norm / optax.tree.norm(grads))
        return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)

    return optax.stateless(clip)


def num_updates(opt_state: optax.OptState) -> jax.Array:
    """Returns the number of updates that an optimizer has counted, an int32 scalar.

    Its schedule is a function of this number. The number is less than the number of steps if
    float16 skipped some. All parts of a chain count alike.
    """
    return optax.tree.get_all_with_path(opt_state, "count")[0][1]


def decay_mask(params: Any) -> Any:
    """Returns, for every parameter, whether weight decay applies: kernels and embeddings."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in _DECAYED, params)
