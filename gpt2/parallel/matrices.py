"""Matrices dealt out to devices, each computed whole by one of them: for optimizers like Muon."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gpt2.parallel.rules import MESH_AXES
from gpt2.utils.trees import Tree


def matrix_spec(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Returns how matrices `[..., rows, columns]` are stored: rows over fsdp, columns over tensor.

    Kernels whose rows are the model's width are stored like that. A side that its mesh axis does
    not divide stays whole, and so do vectors (one row, or one column).
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
    """Where an optimizer computes whole matrices.

    Attributes:
        mesh: whose devices share them; None: each device computes all of them.
        platform: of the devices: `cpu`, `gpu` or `tpu`.
    """

    mesh: Mesh | None = None
    platform: str = "cpu"

    def map(
        self,
        function: Callable,
        stacks: Tree,
        *scalars: Array,
    ) -> Tree:
        """Returns `function(stacks, *scalars)`, each device computing for matrices of its own.

        `function` maps a tree of stacks `[S, ?, ?]` to another one, matrix by matrix; it sees a
        part, filled up with zeros. Results are stored by `matrix_spec`. Each matrix crosses the
        network once in and once out, over each axis that splits it.
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

        def deal(x: Array) -> Array:
            whole = (0, 0)
            x = jnp.pad(x, ((0, missing), whole, whole))
            return _split(x, mesh, (0, 1, 2, 3))

        def collect(x: Array) -> Array:
            x = _split(x, mesh, (2, 1, 0))
            return x[:length]

        dealt = jax.tree.map(deal, stacks)
        results = mapped(dealt, *scalars)
        return jax.tree.map(collect, results)


def _split(x: Array, mesh: Mesh, numbers: tuple[int, ...]) -> Array:
    """Splits the first axis of a stack over so many axes of the mesh, by one number after another.

    XLA's partitioner would gather all for several at once. What is left splits the matrices.
    """
    stored = matrix_spec(x.shape, mesh)[1:]
    for number in numbers:
        over = MESH_AXES[:number]
        sides = [None if axis in over else axis for axis in stored]
        sharding = NamedSharding(mesh, PartitionSpec(over, *sides))
        x = jax.lax.with_sharding_constraint(x, sharding)
    return x
