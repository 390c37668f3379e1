"""FSDP by layer: an array of which each device holds a shard is gathered where it is used.

These are for the trace of one device, within a `shard_map` over `fsdp` (Zhao et al. 2023, "PyTorch
FSDP", section 3.2: a unit is gathered before it is used, and its gradients are scattered).
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
    """How an array is split over the devices of an fsdp group.

    Attributes:
        axis: the axis that is split.
        stages: how many shards there are, as factors: the sides of the torus of chips that the
            group fills, outermost first, or just the number.
        forget: whether XLA would otherwise keep the whole from the forward pass to the backward
            pass, for want of a scan or rematerialisation between them.
    """

    axis: int
    stages: tuple[int, ...]
    forget: bool = False

    @property
    def number(self) -> int:
        """The number of shards."""
        return math.prod(self.stages)

    def shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a shard of an array of this shape."""
        axis = self.axis
        return (*shape[:axis], shape[axis] // self.number, *shape[axis + 1 :])

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of an array whose shards have this shape."""
        return (
            *shape[: self.axis],
            shape[self.axis] * self.number,
            *shape[self.axis + 1 :],
        )

    def gather(self, shard: Array) -> Array:
        """Returns the whole array."""
        found = jnp.moveaxis(jax.lax.all_gather(shard, AXIS), 0, self.axis)
        return found.reshape(self.whole_shape(shard.shape))

    def scatter(self, gradient: Array) -> Array:
        """Returns this device's shard of the sum of all devices' whole gradients."""
        # Shards lie one after another in memory: TPU compilers turn a reduce-scatter of the last
        # axis into an all-reduce where its shards do not fill the 128 lanes. They do the same over
        # more than one axis of a torus, and not over one after another.
        shape = gradient.shape
        apart = gradient.reshape(
            *shape[: self.axis], self.number, -1, *shape[self.axis + 1 :]
        )
        apart = jnp.moveaxis(apart, self.axis, 0)
        shard = apart.shape[1:]
        stride = self.number
        # Three axes leave a compiler no order in which the shards are not the outermost.
        apart = apart.reshape(*self.stages, -1, shard[-1])
        for size in self.stages:
            stride //= size
            starts = (
                i + j
                for i in range(0, self.number, stride * size)
                for j in range(stride)
            )
            groups = [[start + k * stride for k in range(size)] for start in starts]
            together = groups if len(self.stages) > 1 else None
            apart = jax.lax.psum_scatter(apart, AXIS, axis_index_groups=together)
        return apart.reshape(shard)


class Shard(NamedTuple):
    """A shard of a parameter, and how it belongs to the whole."""

    array: Array
    shards: Shards


def torus_sides(devices: np.ndarray) -> tuple[int, ...]:
    """Returns the sides of the torus that devices `[N]` fill in order, or just their number."""
    coords = [tuple(getattr(device, "coords", ())) for device in devices]
    sides = tuple(len(set(places)) for places in zip(*coords, strict=True))
    number = len(coords)
    fills_torus = len(set(coords)) == math.prod(sides) == number
    if fills_torus and coords == sorted(coords) and number > 1:
        return tuple(side for side in sides if side > 1)
    return (number,)


def gather(parameter: Array | Shard, dtype: DTypeLike) -> Array:
    """Returns a whole parameter, rounded to `dtype`, in which it crosses the network.

    It and its gradient have the parameter's own type.
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
    """Returns `function(x, parameter, *others, dtype=...)` that takes a `Shard` as its parameter.

    The whole is gathered once forward and once backward, and never kept. Arrays are positional.
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
            # XLA drops the result, which was computed before.
            _, derive = jax.vjp(compute, x, whole, *others)
            dx, dwhole, *dothers = derive(dy)
            return dx, shards.scatter(dwhole), *dothers

        run.defvjp(forward, backward)
        return run(x, parameter.array, *others)

    return apply


def look_up(table: Array | Shard, indices: Array, dtype: DTypeLike) -> Array:
    """Computes `plain.look_up`, from shards [V, D / devices] of a table [V, D].

    Tokens and vectors cross the network in place of the table, which is larger. The gradient of a
    device's columns is complete without another sum.
    """
    if not isinstance(table, Shard):
        return plain.look_up(table, indices, dtype)
    everyone = jax.lax.all_gather(indices, AXIS)  # [devices, B, T]
    found = jnp.take(table.array, everyone, axis=0).astype(dtype)
    last = found.ndim - 1
    mine = jax.lax.all_to_all(found, AXIS, split_axis=0, concat_axis=last, tiled=True)
    return mine[0]
