"""Norms of every tensor in a step: parameters, gradients and updates.

A program of its own computes a step again and keeps only these figures. The steps that train are
therefore the same, to the bit, whether they are watched or not.
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import Array

from gpt2.optim.parameters import is_stacked, map_parameters, unrolled_names
from gpt2.training.state import TrainState
from gpt2.training.steps import Batch, MapSum, Metrics, UpdateFn, on_one_device


def make_watch_step(
    update: UpdateFn,
) -> Callable[[TrainState, Batch, MapSum], Metrics]:
    """Returns `watch_step(state, batch, map_sum=on_one_device) -> norms`, float32 scalars.

    They are `param_norm/NAME` before the step, `grad_norm/NAME` before clipping, and
    `update_norm/NAME`.
    """

    def watch_step(
        state: TrainState, batch: Batch, map_sum: MapSum = on_one_device
    ) -> Metrics:
        step = update(state, batch, map_sum)
        norms = Metrics()

        def note(kind: str, path: tuple[str, ...], leaf: Array) -> None:
            each = leaf if is_stacked(path) else [leaf]
            names = unrolled_names(path, leaf)
            for name, tensor in zip(names, each, strict=True):
                square = jnp.sum(jnp.square(tensor))
                norms[f"{kind}_norm/{name}"] = jnp.sqrt(square)

        for kind, tree in (
            ("param", state.params),
            ("grad", step.grads),
            ("update", step.updates),
        ):
            map_parameters(partial(note, kind), tree)
        return norms

    return watch_step
