"""The transformations around an optimizer's direction: clipping, masks, decay and averages."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from optax.contrib import schedule_free_eval_params

from gpt2.utils.parameters import ParamInfo
from gpt2.utils.trees import Tree

# The smallest fraction by which a cautious update is divided, as in the authors' code.
_MIN_FRACTION = 1e-3
# Copying a tensor of fewer elements takes less time than a kernel launch.
_SMALL = 2**17


def joint_norm(grads: Tree) -> Array:
    """Return the global norm of the gradients.

    Small tensors are concatenated first, so that a GPU sums their squares with one kernel.
    """
    leaves = jax.tree.leaves(grads)
    small = [leaf.ravel() for leaf in leaves if leaf.size < _SMALL]
    large = [leaf for leaf in leaves if leaf.size >= _SMALL]
    if not small:
        return optax.tree.norm(large)
    joined = jnp.concatenate(small)
    return optax.tree.norm([*large, joined])


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Return `optax.clip_by_global_norm`, with a multiplication instead of a division.

    XLA:CPU would store the quotients of optax's form (docs/performance.md, XLA:CPU note 1). A
    caller that has computed the norm of the gradients can pass it to `update` as `grad_norm`.
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
    """Return `direction` with a mask, which sets some entries of the update to 0.

    As in Liang et al. 2024, algorithm 1, these are the entries whose sign differs from the sign of
    the gradient. The remaining entries of a tensor are divided by a fraction: their number, divided
    by the number of entries whose gradient is not 0. `parameters` is a tree of `ParamInfo`.
    """

    def mask(info: ParamInfo, update: Array, grad: Array) -> Array:
        agrees = (update * grad > 0).astype(update.dtype)
        # Each layer of a stacked parameter counts as a tensor, as if layers were not stacked.
        first = int("layers" in info.axes)
        axes = tuple(range(first, update.ndim))
        has_gradient = jnp.sum(
            grad != 0,
            axes,
            keepdims=True,
            dtype=update.dtype,
        )
        agreed = jnp.sum(agrees, axes, keepdims=True)
        fraction = agreed / jnp.maximum(has_gradient, 1)
        fraction = jnp.maximum(fraction, _MIN_FRACTION)
        return update * (agrees / fraction)

    def update_fn(grads, state, params=None):
        updates, state = direction.update(grads, state, params)
        return jax.tree.map(mask, parameters, updates, grads), state

    return optax.GradientTransformation(direction.init, update_fn)


def cautious_decay(decay: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return the weight decay `decay`, restricted to entries that the update also moves towards 0.

    An update of 0 counts as such an update. See Chen et al. 2025, arXiv 2510.12402.
    """

    def choose(update: Array, decayed: Array, param: Array) -> Array:
        return jnp.where(update * param >= 0, decayed, update)

    def update_fn(updates: Tree, state: optax.OptState, params: Tree = None):
        decayed, state = decay.update(updates, state, params)
        chosen = jax.tree.map(choose, updates, decayed, params)
        return chosen, state

    return optax.GradientTransformation(decay.init, update_fn)


class AverageState(NamedTuple):
    """The state of `average_parameters`."""

    count: Array  # type: ignore[assignment] # int32 scalar, number of updates so far
    averaged: Array  # int32 scalar, number of updates in the average
    average: Tree  # a tree like the parameters


def average_parameters(
    decay: float = 0, start: int = 0
) -> optax.GradientTransformation:
    """Return a transformation that averages the parameters.

    It must be the last transformation of a chain, because it needs the final updates.

    With a `decay`, the average is exponential (Tarvainen and Valpola 2017). Otherwise, it is the
    mean of the parameters over all updates after the first `start` updates. During the first
    `start` updates, the average equals the newest parameters. If `start` becomes larger while the
    average contains earlier updates, these updates remain in the average.
    """

    def init_fn(params: Tree) -> AverageState:
        # A step donates parameters and optimizer state, so the two must not share buffers.
        copy = jax.tree.map(jnp.copy, params)
        return AverageState(jnp.int32(0), jnp.int32(0), copy)

    def update_fn(updates: Tree, state: AverageState, params: Tree = None):
        # If a run continues with more steps, its tail starts later, and `averaged` decreases.
        averaged = jnp.clip(state.count + 1 - start, 0, state.averaged + 1)
        weight = decay or 1 - 1 / jnp.maximum(averaged, 1)
        average = jax.tree.map(
            lambda old, param, update: weight * old + (1 - weight) * (param + update),
            state.average,
            params,
            updates,
        )
        count = optax.safe_increment(state.count)
        return updates, AverageState(count, averaged, average)

    return optax.GradientTransformation(init_fn, update_fn)


def averaged_params(opt_state: optax.OptState, params: Tree) -> Tree:
    """Return the parameters to validate and export: the optimizer's average, or `params`.

    `params` are returned if the optimizer does not average parameters.
    """
    averaged = optax.tree.get(opt_state, "AverageState")
    if averaged:
        return averaged.average
    free = optax.tree.get(opt_state, "ScheduleFreeState")
    if free:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
        return jax.jit(schedule_free_eval_params, out_shardings=shardings)(free, params)
    return params


def num_updates(opt_state: optax.OptState) -> Array | None:
    """Return the number of steps that have updated the parameters, an int32 scalar.

    Steps that were skipped, for example because of NaN, do not count. The number is the count of
    the schedule's state. Return None if the optimizer has no schedule.
    """
    states = optax.tree.get_all_with_path(opt_state, "ScaleByScheduleState")
    if not states:
        return None
    _, last = states[-1]
    return last.count
