"""Norms and histograms of every tensor in a step: parameters, gradients and updates.

A program of its own computes a step again and keeps only these figures. The steps that train are
therefore the same, to the bit, whether they are watched or not.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gpt2.optim.parameters import is_stacked, map_parameters, unrolled_names
from gpt2.telemetry.writers import NUM_BUCKETS, Histogram
from gpt2.training.state import TrainState
from gpt2.training.steps import Batch, MapSum, Update, on_one_device

Statistics = dict[str, dict[str, Any]]


def make_watch_step(
    update: Callable[[TrainState, Batch, MapSum], Update],
) -> Callable[[TrainState, Batch, MapSum], Statistics]:
    """Returns `watch_step(state, batch, map_sum=on_one_device) -> statistics`.

    `norms` holds `param_norm/NAME` before the step, `grad_norm/NAME` before clipping, and
    `update_norm/NAME`; `histograms` a `Histogram` of each tensor: `param/NAME` and so on.
    """

    def watch_step(state: TrainState, batch: Batch, map_sum: MapSum = on_one_device) -> Statistics:
        step = update(state, batch, map_sum)
        found: Statistics = {"norms": {}, "histograms": {}}

        def note(kind: str, path: tuple[str, ...], leaf: jax.Array) -> None:
            each = leaf if is_stacked(path) else [leaf]
            for name, tensor in zip(unrolled_names(path, leaf), each, strict=True):
                found["norms"][f"{kind}_norm/{name}"] = jnp.sqrt(jnp.sum(jnp.square(tensor)))
                found["histograms"][f"{kind}/{name}"] = count_values(tensor)

        for kind, tree in (("param", state.params), ("grad", step.grads), ("update", step.updates)):
            map_parameters(lambda path, leaf, kind=kind: note(kind, path, leaf), tree)
        return found

    return watch_step


def count_values(tensor: jax.Array) -> Histogram:
    """Returns the histogram of a tensor, in buckets of equal width from its least value on.

    It goes over the tensor once for each bucket: such sums stay where a sharded tensor lies.
    """
    low, high = tensor.min(), tensor.max()
    ends = low + (high - low) * jnp.arange(1, NUM_BUCKETS) / NUM_BUCKETS
    below = jax.lax.map(lambda end: jnp.sum(tensor < end, dtype=jnp.int32), ends)
    counts = jnp.diff(below, prepend=0, append=tensor.size)
    return Histogram(low, high, counts)
