"""How a training state is spread over devices, and what it takes of their memory."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gpt2.errors import UserError
from gpt2.parallel.matrices import matrix_spec

# If every device holds more than this share of parameter bytes whole, some axis lacks a rule.
MAX_UNSHARDED = 0.02


class HasParams(Protocol):
    """A pytree of arrays, or of their shapes, such as `gpt2.training.state.TrainState`."""

    params: Any
    opt_state: Any

    def replace(self, **members: Any) -> Any:
        """Returns the state with other members."""
        ...


State = TypeVar("State", bound=HasParams)


def abstract_state(backend: Any, init_fn: Callable[[jax.Array], State]) -> State:
    """Returns the shapes, dtypes and shardings of the state that `init_fn(key)` would give."""
    shapes = jax.eval_shape(init_fn, jax.random.key(0))
    return with_shardings(shapes, backend.state_shardings(shapes))


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Returns a tree of shapes with shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def gather_whole(tree: Any, mesh: Mesh) -> Any:
    """Returns a tree whole on this process's first device. Every process must call it."""
    whole = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))(tree)
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), whole)


def bytes_per_device(tree: Any) -> int:
    """Returns how much of a tree of placed arrays, or shapes with shardings, one device holds."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def state_bytes(backend: Any, state: HasParams) -> dict[str, int]:
    """Returns bytes per device of parameters, optimizer state and the sum of gradients.

    `state` holds arrays, or shapes with shardings such as `abstract_state` returns.
    """
    gradients = with_shardings(state.params, backend.gradient_shardings(state.params))
    parts = {"parameters": state.params, "optimizer": state.opt_state, "gradients": gradients}
    return {name: bytes_per_device(tree) for name, tree in parts.items()}


def unsharded_share(params: Any) -> float:
    """Returns the share of parameter bytes that every device holds whole."""
    leaves = jax.tree.leaves(params)
    whole = sum(_bytes(leaf) for leaf in leaves if leaf.sharding.is_fully_replicated)
    return whole / sum(map(_bytes, leaves))


def _bytes(leaf: Any) -> int:
    return leaf.size * leaf.dtype.itemsize


def check_sharded(params: Any, mesh_shape: Mapping[str, int]) -> None:
    """Refuses parameters that are left whole on a mesh that has axes to split them.

    `mesh_shape` has the sizes of the axes that should split them.
    """
    asked = [f"parallel.{axis}={n}" for axis, n in mesh_shape.items() if axis != "data" and n > 1]
    if asked and (share := unsharded_share(params)) > MAX_UNSHARDED:
        raise UserError(
            f"{' x '.join(asked)} leaves {share:.1%} of the parameters whole on every device",
            "Split them by --config.parallel.rules, or use --config.parallel.strategy=ddp",
        )


def optimizer_specs(opt_state: Any, params: Any, storage: Any, mesh: Mesh) -> Any:
    """Returns a PartitionSpec for every leaf of an optimizer's state.

    State is spread like the parameter whose path its own path ends with. `storage` has the
    PartitionSpecs of state that has the shapes of `params`.
    """
    by_path = {
        _names(path): (param.shape, spec)
        for (path, param), spec in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(storage), strict=True
        )
    }

    def find(path: Any, leaf: Any) -> PartitionSpec:
        names = _names(path)
        for start in range(len(names)):
            if names[start:] in by_path:
                return _spec(leaf.shape, *by_path[names[start:]], mesh)
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(find, opt_state)


def _names(path: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)


def _spec(
    shape: tuple[int, ...], param_shape: tuple[int, ...], param_spec: PartitionSpec, mesh: Mesh
) -> PartitionSpec:
    """Returns the spec of state of this shape, whose parameter has that one.

    - Axes of the parameter that were kept, summed to length 1 or dropped (second moments of rows
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
