"""FSDP by layer: gather a sharded parameter where it is used, and scatter its gradient.

These functions run on one device's shards, inside a `shard_map` over the mesh axis `fsdp` (Zhao et
al. 2023, "PyTorch FSDP", section 3.2).
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from gpt2.ops import plain

AXIS = "fsdp"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Shards:
    """How an array is split over an fsdp group: the devices along the mesh axis `fsdp`.

    Attributes:
        axis: the axis that is split.
        stages: factors of the number of shards. `scatter` runs one reduce-scatter for each. If the
            group's chips fill a torus, the factors are the torus's sides, outermost first;
            otherwise, the number of shards is the only factor.
        forget: whether the backward pass has an optimization barrier. Without a loop over layers
            and without rematerialisation, the barrier is necessary: otherwise XLA would store the
            gathered array from the forward to the backward pass, instead of gathering it again.
    """

    axis: int
    stages: tuple[int, ...]
    forget: bool = False

    @property
    def number(self) -> int:
        """Number of shards."""
        return math.prod(self.stages)

    def shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a shard, given the shape of the whole array."""
        axis = self.axis
        return (*shape[:axis], shape[axis] // self.number, *shape[axis + 1 :])

    def gather(self, shard: Array) -> Array:
        """Return the whole array, from this device's shard of it."""
        shards = jnp.moveaxis(jax.lax.all_gather(shard, AXIS), 0, self.axis)
        return jax.lax.collapse(shards, self.axis, self.axis + 2)

    def scatter(self, gradient: Array) -> Array:
        """Sum the whole gradients of all devices, and return this device's shard of the sum."""
        # The index of the shard becomes the first axis, because TPU compilers turn a reduce-scatter
        # along the last axis into an all-reduce if a shard does not fill the 128 lanes. They also
        # do so for a reduce-scatter over several axes of a torus, so each axis of the torus has its
        # own reduce-scatter.
        shape = gradient.shape
        shards = gradient.reshape(
            *shape[: self.axis], self.number, -1, *shape[self.axis + 1 :]
        )
        shards = jnp.moveaxis(shards, self.axis, 0)
        shard_shape = shards.shape[1:]
        stride = self.number
        # The axes between the index of the shard and the last axis are merged. The compiler then
        # has to choose a layout in which the index is the outermost axis.
        shards = shards.reshape(*self.stages, -1, shard_shape[-1])
        for size in self.stages:
            stride //= size
            groups = []
            for outer in range(0, self.number, stride * size):
                for start in range(outer, outer + stride):
                    groups.append([start + k * stride for k in range(size)])
            axis_groups = groups if len(self.stages) > 1 else None
            shards = jax.lax.psum_scatter(shards, AXIS, axis_index_groups=axis_groups)
        return shards.reshape(shard_shape)


class Shard(NamedTuple):
    """A device's shard of a parameter, and how the parameter is split."""

    array: Array
    shards: Shards


def torus_sides(devices: np.ndarray) -> tuple[int, ...]:
    """Return the lengths of the sides of the torus of chips that devices `[N]` fill.

    Sides of length 1 are left out. Return `(N,)` if the devices do not fill a torus, or are not in
    the order of their coordinates.
    """
    coords = [tuple(getattr(device, "coords", ())) for device in devices]
    sides = tuple(len(set(positions)) for positions in zip(*coords, strict=True))
    number = len(coords)
    fills_torus = len(set(coords)) == math.prod(sides) == number
    if fills_torus and coords == sorted(coords) and number > 1:
        return tuple(side for side in sides if side > 1)
    return (number,)


def gather(parameter: Array | Shard, dtype: DTypeLike) -> Array:
    """Return a whole parameter. If `parameter` is a `Shard`, gather the shards of all devices.

    Shards are sent over the network in `dtype`, which rounds the result. The result and its
    gradient nevertheless have the parameter's dtype.
    """
    if not isinstance(parameter, Shard):
        return parameter
    return _gather(parameter.array, parameter.shards, jnp.dtype(dtype))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(array, shards, dtype):
    return shards.gather(array.astype(dtype)).astype(array.dtype)


_gather.defvjp(
    lambda array, shards, dtype: (_gather(array, shards, dtype), None),
    lambda shards, dtype, _, gradient: (shards.scatter(gradient),),
)


def gathering(function: Callable) -> Callable:
    """Wrap `function(x, parameter, *others, dtype=...)` so that `parameter` may be a `Shard`.

    The parameter is gathered in the forward pass and again in the backward pass, and is not stored
    between them. Pass arrays by position, because the backward rule covers only such arguments.
    """

    def apply(
        x: Array,
        parameter: Array | Shard,
        *others: Array | None,
        dtype: DTypeLike,
        **options: Any,
    ) -> Any:
        compute = partial(function, dtype=dtype, **options)
        if not isinstance(parameter, Shard):
            return compute(x, parameter, *others)
        shards = parameter.shards

        @jax.custom_vjp
        def run(x, array, *others):
            return compute(x, gather(Shard(array, shards), dtype), *others)

        def forward(*arguments):
            return run(*arguments), arguments

        def backward(arguments, dy):
            x, array, *others = arguments
            if shards.forget:
                array, dy = jax.lax.optimization_barrier((array, dy))
            whole = gather(Shard(array, shards), dtype)
            # XLA removes the forward computation here, because nothing reads its result.
            _, derive = jax.vjp(compute, x, whole, *others)
            dx, dwhole, *dothers = derive(dy)
            return dx, shards.scatter(dwhole), *dothers

        run.defvjp(forward, backward)
        return run(x, parameter.array, *others)

    return apply


def look_up(table: Array | Shard, indices: Array, dtype: DTypeLike) -> Array:
    """Return the rows `[B, T, D]` of a table at int32 `indices` `[B, T]`, in `dtype`.

    The table is an array `[V, D]`, or a `Shard` of it, whose array is `[V, D / devices]`. With a
    `Shard`, devices exchange indices and parts of rows instead of the table, which is larger. The
    gradient of a device's columns is then already summed over all devices of the fsdp group.
    """
    if not isinstance(table, Shard):
        return plain.look_up(table, indices, dtype)
    all_indices = jax.lax.all_gather(indices, AXIS)  # [devices, B, T]
    columns = jnp.take(table.array, all_indices, axis=0).astype(dtype)
    last = columns.ndim - 1
    rows = jax.lax.all_to_all(columns, AXIS, split_axis=0, concat_axis=last, tiled=True)
    return rows[0]
