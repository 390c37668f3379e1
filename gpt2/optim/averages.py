"""Averages of the weights, which are validated and exported in place of the weights in training."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import ScheduleFreeState, schedule_free_eval_params


class AverageState(NamedTuple):
    """State of `average_parameters`.

    Attributes:
        average: a tree like the parameters.
    """

    average: Any


def average_parameters(decay: float) -> optax.GradientTransformation:
    """Keeps an exponential average of the new parameters; it begins with the initial ones.

    It is the last of a chain, where updates are final.

    Args:
        decay: share of the old average that each step keeps (Polyak and Juditsky 1992; the form is
            that of Tarvainen and Valpola 2017).
    """

    def init_fn(params: Any) -> AverageState:
        return AverageState(jax.tree.map(jnp.copy, params))  # a buffer that may be donated

    def update_fn(updates: Any, state: AverageState, params: Any = None):
        average = jax.tree.map(
            lambda old, param, update: decay * old + (1 - decay) * (param + update),
            state.average,
            params,
            updates,
        )
        return updates, AverageState(average)

    return optax.GradientTransformation(init_fn, update_fn)


def schedule_free(
    optimizer: optax.GradientTransformation, schedule: optax.Schedule, beta: float
) -> optax.GradientTransformation:
    """Averages in place of a momentum and a schedule (Defazio et al. 2024, algorithm 1).

    Args:
        optimizer: without momentum; with its learning rate.
        schedule: that learning rate, by step counted from 0. Averages weigh steps by its square.
        beta: share of the average in the point where gradients are taken.
    """
    return optax.contrib.schedule_free(optimizer, lambda count: schedule(count - 1), b1=beta)


def averaged_params(opt_state: optax.OptState, params: Any) -> Any:
    """Returns the parameters that are validated and exported.

    They are the average that the optimizer keeps, or `params` themselves if it keeps none.
    """
    kinds = (AverageState, ScheduleFreeState)
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kinds))
    for node in nodes:
        if isinstance(node, AverageState):
            return node.average
        if isinstance(node, ScheduleFreeState):
            shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
            return jax.jit(schedule_free_eval_params, out_shardings=shardings)(node, params)
    return params
