"""How a training state is spread over devices, and what it takes of their memory."""

import itertools
from typing import TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gpt2.errors import UserError
from gpt2.parallel.matrices import matrix_spec
from gpt2.utils.trees import Tree

State = TypeVar("State", bound=Tree)


def with_shardings(shapes: State, shardings: State) -> State:
    """Returns a tree of shapes with shardings."""
    return jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding), shapes, shardings
    )


def check_split(path: tuple, leaf: Tree, sharding: NamedSharding) -> None:
    """Refuses a sharding that does not divide a leaf of a state."""
    try:
        sharding.shard_shape(leaf.shape)
    except ValueError:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        raise UserError(
            f"{name} {leaf.shape} is not split by {sharding.spec} of {dict(sharding.mesh.shape)}"
        ) from None


def gather_whole(tree: Tree, mesh: Mesh) -> Tree:
    """Returns a tree whole on this process's first device. Every process must call it."""
    whole = jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), whole)


def optimizer_specs(
    opt_state: Tree,
    params: Tree,
    storage: Tree,
    mesh: Mesh,
) -> Tree:
    """Returns a PartitionSpec for every leaf of an optimizer's state.

    State is spread as `storage` says of the parameter whose path its own path ends with.
    """
    leaves = zip(
        jax.tree_util.tree_leaves_with_path(params),
        jax.tree.leaves(storage),
        strict=True,
    )
    by_path = {}
    for (path, param), spec in leaves:
        by_path[path] = param.shape, spec

    def find(path: Tree, leaf: Tree) -> PartitionSpec:
        for start in range(len(path)):
            ending = path[start:]
            if ending in by_path:
                param_shape, spec = by_path[ending]
                return _spec(leaf.shape, param_shape, spec, mesh)
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(find, opt_state)


def _spec(
    shape: tuple[int, ...],
    param_shape: tuple[int, ...],
    param_spec: PartitionSpec,
    mesh: Mesh,
) -> PartitionSpec:
    """Returns the spec of state of this shape, whose parameter has that one.

    - Axes of the parameter that were kept, summed to length 1 or dropped (second moments of rows
      and of columns) are split as they are in the parameter.
    - Square matrices (SOAP's, over a side of a kernel) are larger than the kernel, and are split as
      kernels are.
    - State of another shape is whole.
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
