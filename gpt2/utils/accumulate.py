"""Gradient accumulation: a scan over the micro-batches of a large batch."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from gpt2.utils.trees import Tree


def accumulate(
    function: Callable[[dict[str, Array], Array], Tree],
    batch: dict[str, Array],
    num_micro_batches: int,
) -> Tree:
    """Return the sum of `function(micro_batch, index)` over all micro-batches of `batch`.

    All micro-batches have the same number of rows, so the number of rows of the batch must be a
    multiple of `num_micro_batches`. The result is a sum, not a mean: the caller divides it once by
    the number of tokens, so that every token has the same weight, however many tokens its
    micro-batch has.
    """
    if num_micro_batches == 1:
        return function(batch, jnp.int32(0))
    micro_batches = jax.tree.map(
        lambda x: x.reshape(num_micro_batches, -1, *x.shape[1:]), batch
    )

    def body(total, indexed_micro_batch):
        index, micro_batch = indexed_micro_batch
        return jax.tree.map(jnp.add, total, function(micro_batch, index)), None

    first = jax.tree.map(lambda x: x[0], micro_batches)
    shapes = jax.eval_shape(function, first, jnp.int32(0))
    zeros = jax.tree.map(jnp.zeros_like, shapes)
    indices = jnp.arange(num_micro_batches, dtype=jnp.int32)
    total, _ = jax.lax.scan(body, zeros, (indices, micro_batches))
    return total
