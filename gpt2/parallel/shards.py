"""FSDP by layer: replace operations in the table `Ops` with operations on sharded parameters."""

import dataclasses
from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
from jax import Array

from gpt2.ops import Ops, plain
from gpt2.ops.fsdp import Shard, Shards, gather, gathering, look_up
from gpt2.ops.plain import AxisNames, Init, Shape
from gpt2.utils.parameters import ParamInfo
from gpt2.utils.trees import Tree

# A function that returns the shards of a parameter, given its logical axes. None means that devices
# hold the whole parameter.
ShardsFor = Callable[[AxisNames], Shards | None]


def gather_by_layer(ops: Ops, shards_for: ShardsFor) -> Ops:
    """Return a copy of `ops` whose operations accept sharded parameters (gpt2/ops/fsdp.py).

    `shards_for(axes)` returns how a parameter with these logical axes is split, or None if devices
    hold the whole parameter. Most operations gather the parameter when they use it.
    """

    def add_rows(x, table):
        return ops.add_rows(x, gather(table, x.dtype))

    def pad_vocab(table):
        if not isinstance(table, Shard):
            return ops.pad_vocab(table)
        return table._replace(array=ops.pad_vocab(table.array))

    def head_loss(loss, hidden, table, rows, *, dtype, logits_dtype="float32"):
        array = gather(table, dtype)
        return ops.head_loss(
            loss, hidden, array, rows, dtype=dtype, logits_dtype=logits_dtype
        )

    return dataclasses.replace(
        ops,
        param=partial(shard_param, shards_for=shards_for),  # type: ignore[arg-type]
        whole=partial(gather, dtype="float32"),
        linear=gathering(ops.linear),
        linear_parts=gathering(ops.linear_parts),
        look_up=look_up,
        add_rows=add_rows,
        pad_vocab=pad_vocab,
        head_loss=head_loss,
    )


def shard_param(
    module: nn.Module,
    name: str,
    init: Init,
    shape: Shape,
    info: ParamInfo,
    *,
    shards_for: ShardsFor,
) -> Array | Shard:
    """Return the parameter `name` of a module or, if it is split, this device's `Shard` of it.

    `shards_for(info.axes)` returns how the parameter is split, or None. Inside a `shard_map`, Flax
    has only a device's shard of the parameter. The shape that Flax checks is therefore the shape of
    the shard.
    """
    shards = shards_for(info.axes)
    local_shape = shards.shard_shape(shape) if shards else shape
    array = plain.param(module, name, init, local_shape, info)
    return Shard(array, shards) if shards else array


def isolate(loss: Callable) -> Callable:
    """Return `loss`, changed so that parameters are gathered separately for each micro-batch.

    This needs an optimization barrier, because XLA would otherwise gather parameters once for all
    micro-batches and store them. Pass the arguments of the loss by position.
    """

    def isolated(params: Tree, micro_batch: Tree, *others: Array | None):
        params, micro_batch = jax.lax.optimization_barrier((params, micro_batch))
        return loss(params, micro_batch, *others)

    return isolated
