"""Matrices dealt out to devices, each computed whole by one of them: for optimizers like Muon."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from gpt2.parallel.rules import MESH_AXES
from gpt2.utils.platform import target


def matrix_spec(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Returns how matrices `[..., rows, columns]` are stored: rows over fsdp, columns over tensor.

    Kernels whose rows are the model's width are stored like that. A side that its mesh axis does
    not divide stays whole, and so do vectors (one row, or one column).
    """
    sides = [
        axis if mesh.shape[axis] > 1 and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(("fsdp", "tensor"), shape[-2:], strict=True)
    ]
    return PartitionSpec(*(None,) * (len(shape) - 2), *(sides if min(shape[-2:]) > 1 else ()))


def map_matrices(function: Callable, stacks: Any, *scalars: jax.Array) -> Any:
    """Returns `function(stacks, *scalars)`, each device computing for whole matrices of its own.

    `function` maps a tree of stacks `[S, ?, ?]` to another one, matrix by matrix; it sees a part,
    filled up with zeros. Results are stored by `matrix_spec`. Each matrix crosses the network once
    in, in an all-to-all over the axes that split it, and once out.
    """
    mesh = target().mesh
    if mesh is None or mesh.size == 1:
        return function(stacks, *scalars)
    length = jax.tree.leaves(stacks)[0].shape[0]
    share = math.ceil(length / mesh.size)  # of one device
    padding = (0, share * mesh.size - length), (0, 0), (0, 0)
    stacks = jax.tree.map(lambda x: jnp.pad(x, padding), stacks)
    results = jax.eval_shape(function, stacks, *scalars)
    stored, returned = jax.tree.map(lambda x: matrix_spec(x.shape, mesh), (stacks, results))

    def on_device(stacks, *scalars):
        whole = jax.tree.map(partial(_deal, mesh=mesh), stacks, stored)
        return jax.tree.map(partial(_collect, mesh=mesh), function(whole, *scalars), returned)

    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(stored, *(PartitionSpec() for _ in scalars)),
        out_specs=returned,
        check_vma=False,
    )
    return jax.tree.map(lambda x: x[:length], mapped(stacks, *scalars))


def _deal(x: jax.Array, spec: PartitionSpec, mesh: Mesh) -> jax.Array:
    """Turns this device's parts of all matrices [S, r, c] into some matrices [share, R, C]."""
    axes = tuple(axis for axis in spec if axis)
    rows, columns = (mesh.shape[axis] if axis in axes else 1 for axis in ("fsdp", "tensor"))
    x = x.reshape(*(mesh.shape[axis] for axis in MESH_AXES), -1, *x.shape[1:])
    for dim, axis in enumerate(MESH_AXES):
        if axis not in axes:  # every device along it holds the same
            x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis), 1, dim)
    x = x.reshape(-1, *x.shape[-3:])
    if axes:
        x = jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)
    _, share, r, c = x.shape
    x = x.reshape(rows, columns, share, r, c).transpose(2, 0, 3, 1, 4)
    return x.reshape(share, rows * r, columns * c)


def _collect(x: jax.Array, spec: PartitionSpec, mesh: Mesh) -> jax.Array:
    """Turns this device's matrices [share, R, C] into its parts of all matrices [S, r, c]."""
    axes = tuple(axis for axis in spec if axis)
    others = tuple(axis for axis in MESH_AXES if axis not in axes)
    rows, columns = (mesh.shape[axis] if axis in axes else 1 for axis in ("fsdp", "tensor"))
    share, r, c = x.shape[0], x.shape[1] // rows, x.shape[2] // columns
    x = x.reshape(share, rows, r, columns, c).transpose(1, 3, 0, 2, 4)
    x = x.reshape(rows * columns, share, r, c)
    if axes:
        x = jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)
    if wide := tuple(axis for axis in others if mesh.shape[axis] > 1):
        x = jax.lax.all_gather(x, wide)
    x = x.reshape(*(mesh.shape[axis] for axis in others + axes), share, r, c)
    order = [(others + axes).index(axis) for axis in MESH_AXES]
    return x.transpose(*order, 3, 4, 5).reshape(-1, r, c)
