"""What stands around an optimizer's direction: clipping, masks, decay, rates and averages."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from optax.contrib import schedule_free_eval_params

from gpt2.utils.parameters import ParamInfo
from gpt2.utils.trees import Tree

# The least share of a tensor that a cautious update is scaled up from (the authors' code).
_MIN_SHARE = 1e-3
_SMALL = 2**17  # numbers: a copy of so few costs less than a kernel


def joint_norm(grads: Tree) -> Array:
    """Return the norm of all gradients together, of small ones by one kernel (for GPUs)."""
    leaves = jax.tree.leaves(grads)
    small = [leaf.ravel() for leaf in leaves if leaf.size < _SMALL]
    large = [leaf for leaf in leaves if leaf.size >= _SMALL]
    if not small:
        return optax.tree.norm(large)
    joined = jnp.concatenate(small)
    return optax.tree.norm([*large, joined])


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Return `optax.clip_by_global_norm` as a product: quotients are stored (XLA:CPU note 1).

    `update` takes the gradients' norm as `grad_norm` from a caller that has it.
    """

    def update_fn(
        grads,
        state,
        params=None,
        *,
        grad_norm=None,
        **_,
    ):
        if grad_norm is None:
            grad_norm = optax.tree.norm(grads)
        factor = jnp.minimum(1.0, max_norm / grad_norm)

        def clip(grad: Array) -> Array:
            clipped = grad * factor
            return clipped.astype(grad.dtype)

        return jax.tree.map(clip, grads), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update_fn)


def cautious(
    direction: optax.GradientTransformation, parameters: Tree
) -> optax.GradientTransformation:
    """Drop what a direction does against the gradient (Liang et al. 2024, algorithm 1).

    What is left of a tensor is divided by its share. Entries without a gradient count neither way.
    """

    def mask(info: ParamInfo, update: Array, grad: Array) -> Array:
        agrees = (update * grad > 0).astype(update.dtype)
        # A stacked parameter is one tensor for each layer.
        first = int("layers" in info.axes)
        axes = tuple(range(first, update.ndim))
        asked = jnp.sum(
            grad != 0,
            axes,
            keepdims=True,
            dtype=update.dtype,
        )
        agreed = jnp.sum(agrees, axes, keepdims=True)
        share = agreed / jnp.maximum(asked, 1)
        share = jnp.maximum(share, _MIN_SHARE)
        return update * (agrees / share)

    def update_fn(grads, state, params=None):
        updates, state = direction.update(grads, state, params)
        return jax.tree.map(mask, parameters, updates, grads), state

    return optax.GradientTransformation(direction.init, update_fn)


def cautious_decay(decay: optax.GradientTransformation) -> optax.GradientTransformation:
    """Decay where that does not work against the update (Chen et al. 2025, arXiv 2510.12402)."""

    def choose(update: Array, decayed: Array, param: Array) -> Array:
        return jnp.where(update * param >= 0, decayed, update)

    def update_fn(updates: Tree, state: optax.OptState, params: Tree = None):
        decayed, state = decay.update(updates, state, params)
        chosen = jax.tree.map(choose, updates, decayed, params)
        return chosen, state

    return optax.GradientTransformation(decay.init, update_fn)


class AverageState(NamedTuple):
    """The state of `average_parameters`."""

    count: Array  # type: ignore[assignment] # int32 scalar, updates so far
    averaged: Array  # int32 scalar, of these those in the average
    average: Tree  # a tree like the parameters


def average_parameters(
    decay: float = 0, start: int = 0
) -> optax.GradientTransformation:
    """Keep an average of the parameters after each update. Last of a chain.

    With a decay it is exponential (Tarvainen and Valpola 2017). Else it is the mean of those after
    the update `start`, until which it is the newest.
    """

    def init_fn(params: Tree) -> AverageState:
        copy = jax.tree.map(jnp.copy, params)  # a buffer that may be donated
        return AverageState(jnp.int32(0), jnp.int32(0), copy)

    def update_fn(updates: Tree, state: AverageState, params: Tree = None):
        # Fewer than so far, if the tail begins later than it did.
        averaged = jnp.clip(state.count + 1 - start, 0, state.averaged + 1)
        kept = decay or 1 - 1 / jnp.maximum(averaged, 1)
        average = jax.tree.map(
            lambda old, param, update: kept * old + (1 - kept) * (param + update),
            state.average,
            params,
            updates,
        )
        count = optax.safe_increment(state.count)
        return updates, AverageState(count, averaged, average)

    return optax.GradientTransformation(init_fn, update_fn)


def averaged_params(opt_state: optax.OptState, params: Tree) -> Tree:
    """Return the parameters that are validated and exported: the optimizer's average, if any."""
    averaged = optax.tree.get(opt_state, "AverageState")
    if averaged:
        return averaged.average
    free = optax.tree.get(opt_state, "ScheduleFreeState")
    if free:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
        return jax.jit(schedule_free_eval_params, out_shardings=shardings)(free, params)
    return params


def num_updates(opt_state: optax.OptState) -> Array | None:
    """Return how often the schedule has been asked for a rate, an int32 scalar.

    That is fewer times than steps if some were skipped; None if the state has no schedule.
    """
    found = optax.tree.get_all_with_path(opt_state, "ScaleByScheduleState")
    if not found:
        return None
    _, last = found[-1]
    return last.count
