"""Optimizers, learning-rate schedules and the weight-decay mask, assembled from optax."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gpt2.config import OptimConfig

# Biases and norm scales are the tensors of one dimension in GPT-2's layout; here a name says it,
# since heads and scanned layers give them more.
_DECAYED = ("kernel", "embedding")


def make_schedule(optim: OptimConfig, num_steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the step, counted from 0.

    A linear warm-up reaches `learning_rate` after `warmup_steps` and never gives 0 (nanoGPT's
    form); what follows ends at `end_learning_rate` on step `num_steps`.
    """
    peak, end, warmup = optim.learning_rate, optim.end_learning_rate, optim.warmup_steps
    rest = max(num_steps - warmup, 1)
    if optim.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, rest, alpha=end / peak if peak else 0.0)
    elif optim.schedule == "linear":
        after = optax.linear_schedule(peak, end, rest)
    elif optim.schedule == "constant":
        after = optax.constant_schedule(peak)
    else:  # wsd: warm-up, stable, decay over the last fifth of all steps (Hu et al. 2024)
        decay = min(max(num_steps // 5, 1), rest)
        after = optax.linear_schedule(peak, end, decay, transition_begin=rest - decay)
    if not warmup:
        return after
    return optax.join_schedules(
        [optax.linear_schedule(peak / (warmup + 1), peak, warmup), after], [warmup]
    )


def make_optimizer(optim: OptimConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Returns the optimizer: clipping by global norm, then AdamW (Loshchilov and Hutter 2019)."""
    adamw = optax.adamw(
        schedule,
        b1=optim.beta1,
        b2=optim.beta2,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        mask=decay_mask,
    )
    if not optim.clip_norm:
        return adamw
    return optax.chain(clip_by_global_norm(optim.clip_norm), adamw)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` as a product, which XLA:CPU joins to the update that follows.

    Optax divides every gradient by the norm, and XLA:CPU stores quotients: a copy of all gradients.
    """

    def clip(grads: Any, _: Any) -> Any:
        factor = jnp.minimum(1.0, max_norm / optax.tree.norm(grads))
        return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)

    return optax.stateless(clip)


def num_updates(opt_state: optax.OptState) -> jax.Array:
    """Returns the updates that an optimizer counts, by which it asks its schedule.

    They are fewer than the steps where float16 has skipped some. All parts of a chain count alike.
    """
    return optax.tree.get_all_with_path(opt_state, "count")[0][1]


def decay_mask(params: Any) -> Any:
    """Returns, for every parameter, whether weight decay applies: kernels and embeddings."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in _DECAYED, params)
