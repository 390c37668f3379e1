"""How an optimizer's state is spread: like the parameters that it follows.

State follows a parameter if its path ends with the parameter's path.
"""

from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from gpt2.parallel.matrices import matrix_spec


def specs(opt_state: Any, params: Any, storage: Any, mesh: Mesh) -> Any:
    """Returns a PartitionSpec for every leaf of an optimizer's state.

    Args:
        opt_state: arrays or shapes.
        params: arrays or shapes, plain nested dictionaries.
        storage: PartitionSpecs of state that has their shapes.
        mesh: with the axes of `rules.MESH_AXES`.
    """
    by_path = {
        _names(path): (param.shape, spec)
        for (path, param), spec in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(storage), strict=True
        )
    }

    def follow(path: Any, leaf: Any) -> PartitionSpec:
        names = _names(path)
        for start in range(len(names)):
            if names[start:] in by_path:
                return _spec(leaf.shape, *by_path[names[start:]], mesh)
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(follow, opt_state)


def _names(path: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)


def _spec(
    shape: tuple[int, ...], param_shape: tuple[int, ...], param_spec: PartitionSpec, mesh: Mesh
) -> PartitionSpec:
    """Returns the spec of state of this shape, whose parameter has that one.

    - Axes of the parameter that were kept, summed to length 1 or left out (second moments of rows
      and of columns) are split as they are in the parameter.
    - Square matrices (SOAP's, over a side of a kernel) are larger than the kernel, and are split as
      kernels are.
    - State of another shape splits its longest axis that divides over `fsdp`.
    """
    if shape != param_shape and len(shape) > 1 and shape[-2] == shape[-1] > 1:
        return matrix_spec(shape, mesh)
    entries = (*param_spec, *[None] * (len(param_shape) - len(param_spec)))
    axes = list(zip(param_shape, entries, strict=True))
    if len(shape) == len(axes) and all(
        size in (1, full) for size, (full, _) in zip(shape, axes, strict=True)
    ):
        pairs = zip(shape, axes, strict=True)
        return PartitionSpec(*(entry if size == full else None for size, (full, entry) in pairs))
    remaining = iter(axes)
    kept = [next((axis for axis in remaining if axis[0] == size), None) for size in shape]
    if None not in kept:
        return PartitionSpec(*(axis[1] for axis in kept if axis))
    fsdp = mesh.shape["fsdp"]
    longest = max((size for size in shape if size % fsdp == 0), default=0)
    if fsdp == 1 or not longest:
        return PartitionSpec()
    return PartitionSpec(*[None] * shape.index(longest), "fsdp")
