"""The sharding of a training state over devices."""

import itertools
from typing import TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gpt2.errors import UserError
from gpt2.parallel.matrices import matrix_spec
from gpt2.utils.trees import Tree

State = TypeVar("State", bound=Tree)


def with_shardings(shapes: State, shardings: State) -> State:
    """Return the tree `shapes` of `jax.ShapeDtypeStruct`, with the sharding of each leaf added."""
    return jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding), shapes, shardings
    )


def check_split(path: tuple, leaf: Tree, sharding: NamedSharding) -> None:
    """Raise UserError if a sharding cannot split a leaf of a state evenly."""
    try:
        sharding.shard_shape(leaf.shape)
    except ValueError:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        axes = sharding.mesh.shape.items()
        sizes = " ".join(f"{axis}={size}" for axis, size in axes if size > 1)
        raise UserError(
            f"A mesh with {sizes} cannot split {name} evenly, because its shape is {leaf.shape} "
            f"and it is split as {sharding.spec}",
            "Choose other sizes for parallel.data, parallel.fsdp and parallel.tensor, or other "
            "parallel.rules",
        ) from None


def gather_whole(tree: Tree, mesh: Mesh) -> Tree:
    """Copy a whole tree to every device, and return the copy on this process's first device.

    Every process must call this function, because the processes exchange parts of the tree.
    """
    replicated = jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), replicated)


def optimizer_specs(
    opt_state: Tree,
    params: Tree,
    storage: Tree,
    mesh: Mesh,
) -> Tree:
    """Return a PartitionSpec for every leaf of an optimizer's state.

    `storage` holds a PartitionSpec for each parameter. If the path of a leaf ends with the path of
    a parameter, the leaf belongs to this parameter. If it also has the parameter's shape, it is
    split like the parameter; `_spec` determines how leaves of other shapes are split. Leaves that
    belong to no parameter are replicated.
    """
    leaves = zip(
        jax.tree_util.tree_leaves_with_path(params),
        jax.tree.leaves(storage),
        strict=True,
    )
    by_path = {}
    for (path, param), spec in leaves:
        by_path[path] = param.shape, spec

    def find_spec(path: Tree, leaf: Tree) -> PartitionSpec:
        for start in range(len(path)):
            ending = path[start:]
            if ending in by_path:
                param_shape, spec = by_path[ending]
                return _spec(leaf.shape, param_shape, spec, mesh)
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(find_spec, opt_state)


def _spec(
    shape: tuple[int, ...],
    param_shape: tuple[int, ...],
    param_spec: PartitionSpec,
    mesh: Mesh,
) -> PartitionSpec:
    """Return the PartitionSpec of an optimizer's array, given its parameter's shape and spec.

    - If the optimizer reduced axes of the parameter to length 1 or removed them (second moments of
      rows and of columns), the remaining axes are split as in the parameter.
    - Square matrices (SOAP has one for each side of a kernel) are split like kernels.
    - An array of any other shape is replicated.
    """
    is_square = len(shape) > 1 and shape[-2] == shape[-1] > 1
    if is_square and shape != param_shape:
        return matrix_spec(shape, mesh)
    axes = [*itertools.zip_longest(param_shape, param_spec)]
    entries = []
    for size in shape:
        while axes and size not in (1, axes[0][0]):
            del axes[0]
        if not axes:
            return PartitionSpec()
        full, entry = axes.pop(0)
        if size != full:
            entry = None
        entries.append(entry)
    return PartitionSpec(*entries)
