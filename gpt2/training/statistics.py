"""Norms of every tensor in a step: parameters, gradients and updates.

A separate program computes the step again and returns only these norms. The training steps are
therefore bit-identical with and without norms.
"""

from collections.abc import Callable

import optax
from flax.traverse_util import flatten_dict
from jax import Array

from gpt2.training.state import TrainState
from gpt2.training.steps import MapSum, Metrics, UpdateFn, on_one_device
from gpt2.utils.scan import in_layout
from gpt2.utils.trees import Batch, Tree


def by_name(params: Tree) -> dict[str, Array]:
    """Flatten a tree of parameters into a dict with names such as `h_3/attn/c_attn/kernel`."""
    return flatten_dict(in_layout(params, scanned=False), sep="/")


def make_watch_step(
    update: UpdateFn,
) -> Callable[[TrainState, Batch, MapSum], Metrics]:
    """Return the norm-logging step, `watch_step(state, batch, map_sum=on_one_device) -> norms`.

    `norms` is a dict of float32 scalars. For each parameter NAME, it contains the norms of the
    parameter before the step (`param_norm/NAME`), of its gradient before clipping
    (`grad_norm/NAME`) and of its update (`update_norm/NAME`).
    """

    def watch_step(
        state: TrainState, batch: Batch, map_sum: MapSum = on_one_device
    ) -> Metrics:
        step = update(state, batch, map_sum)
        norms = Metrics()

        for kind, tree in (
            ("param", state.params),
            ("grad", step.grads),
            ("update", step.updates),
        ):
            for name, tensor in by_name(tree).items():
                norms[f"{kind}_norm/{name}"] = optax.tree.norm(tensor)
        return norms

    return watch_step
