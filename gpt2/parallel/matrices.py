"""Distribute the matrices of an optimizer over devices.

Optimizers such as Muon and SOAP apply a function to whole matrices. The parts of each matrix are
gathered on one device, which applies the function to the matrix.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gpt2.parallel.rules import MESH_AXES
from gpt2.utils.trees import Tree


def matrix_spec(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Return the PartitionSpec of stored matrices: `fsdp` splits rows, and `tensor` columns.

    `shape` is the shape `[..., rows, columns]` of an array of matrices.

    With the default `parallel.rules`, kernels whose rows are the model's width are stored in this
    way. A side is not split if its size is not a multiple of the mesh axis's size. Vectors (one
    row, or one column) are not split either.
    """
    sides = [
        axis if mesh.shape[axis] > 1 and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(("fsdp", "tensor"), shape[-2:], strict=True)
    ]
    if min(shape[-2:]) == 1:
        return PartitionSpec()
    leading = (None,) * (len(shape) - 2)
    return PartitionSpec(*leading, *sides)


@dataclasses.dataclass(frozen=True)
class Matrices:
    """The assignment of an optimizer's whole matrices to devices.

    Attributes:
        mesh: the devices over which the matrices are distributed. If it is None, each device
            computes all matrices.
        platform: platform of the devices: `cpu`, `gpu` or `tpu`.
    """

    mesh: Mesh | None = None
    platform: str = "cpu"

    def map(
        self,
        function: Callable,
        stacks: Tree,
        *scalars: Array,
    ) -> Tree:
        """Return `function(stacks, *scalars)`, with each device computing some of the matrices.

        `function` maps a tree of stacks `[S, ?, ?]` of S matrices to another tree, matrix by
        matrix. With several devices, each device calls `function` with some matrices of each stack.
        Stacks are padded with matrices of zeros, so that each device has the same number of
        matrices. Results are sharded by `matrix_spec`. If a mesh axis splits the matrices, devices
        exchange parts before the call, so that each device has whole matrices, and exchange parts
        of the results after the call.
        """
        mesh = self.mesh
        if mesh is None or mesh.size == 1:
            return function(stacks, *scalars)
        mapped = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(PartitionSpec(MESH_AXES), *(PartitionSpec() for _ in scalars)),
            out_specs=PartitionSpec(MESH_AXES),
            check_vma=False,
        )
        length = len(jax.tree.leaves(stacks)[0])
        missing = -length % mesh.size

        def distribute(x: Array) -> Array:
            x = jnp.pad(x, ((0, missing), (0, 0), (0, 0)))
            return _split(x, mesh, (0, 1, 2, 3))

        def collect(x: Array) -> Array:
            x = _split(x, mesh, (2, 1, 0))
            return x[:length]

        distributed = jax.tree.map(distribute, stacks)
        results = mapped(distributed, *scalars)
        return jax.tree.map(collect, results)


def _split(x: Array, mesh: Mesh, numbers: tuple[int, ...]) -> Array:
    """Reshard a stack of matrices `[S, rows, columns]`, with one move for each n in `numbers`.

    After a move, the first n axes of the mesh split the axis S, so that devices along these axes
    hold different matrices. The other axes of the mesh split rows and columns as in `matrix_spec`.
    The caller chooses `numbers` so that each move affects only one axis of the mesh. If a move
    affected several, XLA's partitioner would gather whole stacks.
    """
    stored = matrix_spec(x.shape, mesh)[1:]
    for number in numbers:
        over = MESH_AXES[:number]
        sides = [None if axis in over else axis for axis in stored]
        sharding = NamedSharding(mesh, PartitionSpec(over, *sides))
        x = jax.lax.with_sharding_constraint(x, sharding)
    return x
