"""Parameters of FSDP by layer, of which each device holds a shard (gpt2/ops/fsdp.py)."""

from collections.abc import Callable

import flax.linen as nn
import jax
from jax import Array

from gpt2.ops import plain
from gpt2.ops.fsdp import Shard, Shards, gather_parameter
from gpt2.ops.linear import unpack
from gpt2.ops.plain import Init, Names, Shape
from gpt2.utils.trees import Tree


def shard_param(
    module: nn.Module,
    name: str,
    init: Init,
    shape: Shape,
    axes: Names,
    *,
    shards_for: Callable[[Names], Shards | None],
) -> Array | Shard:
    """Reads a parameter as `plain.param` does: a `Shard` of it where `shards_for` gives some."""
    shards = shards_for(axes)
    if shards is None:
        return plain.param(module, name, init, shape, axes)
    array = plain.param(module, name, init, shards.shard_shape(shape), axes)
    return Shard(array, shards)


def whole(parameter: Array | Shard) -> Array:
    """Returns a parameter, gathered."""
    array, shards = unpack(parameter)
    return gather_parameter(array, shards, array.dtype) if shards else array


def isolate(loss: Callable) -> Callable:
    """Returns a loss that gathers shards for its own micro-batch, and not once for all."""

    def isolated(params: Tree, micro_batch: Tree, *others: Array | None):
        params, micro_batch = jax.lax.optimization_barrier((params, micro_batch))
        return loss(params, micro_batch, *others)

    return isolated
