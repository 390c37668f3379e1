"""From logical axes to mesh axes: the tables that say how everything is spread.

The model names the axes of its parameters and activations by meaning (`embed`, `mlp`, `heads`,
`vocab`, ...). Three tables map those names to mesh axes: `STORAGE` for parameters and optimizer
state between steps, `COMPUTE` for parameters inside a step, and `ACTIVATIONS`. FSDP is the
difference between the first two: a row that stores over `fsdp` and computes whole.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gpt2.errors import UserError
from gpt2.parallel.pieces import Pieces, torus_sides
from gpt2.utils.platform import platform, traced_for

# Axes of the mesh, outermost first. `data` and `fsdp` both split the batch.
MESH_AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

# The head computes with a vocabulary padded to a multiple of this, which fills matrix units and
# divides over devices. Parameters, logits and losses always have the true size.
VOCAB_MULTIPLE = 128

# Logical axis -> mesh axes that split it. `table` is the width of an embedding table. Tables are
# split by columns, since numbers of devices rarely divide their rows (50257, or a context length).
STORAGE: dict[str, tuple[str, ...]] = {
    "layers": (),
    "vocab": (),
    "position": (),
    "table": ("tensor", "fsdp"),
    "embed": ("fsdp",),
    "norm": ("fsdp",),
    "qkv": (),
    "heads": ("tensor",),
    "head_size": (),
    "mlp": ("tensor",),
    "mix": (),
}

# Parameters inside a step: as stored, gathered over `fsdp`.
COMPUTE = {name: tuple(a for a in axes if a != "fsdp") for name, axes in STORAGE.items()}

# Activations, and the output head, whose rows are padded to a number that divides. The model sees
# the batch of one device (see pjit.py).
ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "batch": (),
    "length": (),
    "embed": (),
    "qkv": (),
    "heads": ("tensor",),
    "head_size": (),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "rows": (),
    "table": ("tensor",),
}

# Where the traced program will run: a mesh that splits activations. Each device may hold pieces of
# parameters.
_mesh: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh", default=None)
_has_pieces: contextvars.ContextVar[bool] = contextvars.ContextVar("has_pieces", default=False)


def spec(names: tuple[str, ...], table: Mapping[str, tuple[str, ...]]) -> PartitionSpec:
    """Returns the mesh axes of an array whose axes are called `names`.

    Raises:
        KeyError: the table has no row for a name.
    """
    entries = [table[name] for name in names]
    return PartitionSpec(
        *(axes if len(axes) > 1 else axes[0] if axes else None for axes in entries)
    )


def specs(logical_axes: Any, table: Mapping[str, tuple[str, ...]]) -> Any:
    """Maps a tree of logical axes (tuples of names in a PartitionSpec) to mesh axes.

    Raises:
        UserError: a parameter has an axis without a name, or with one that the table does not know.
    """

    def to_mesh(path: Any, names: PartitionSpec) -> PartitionSpec:
        parameter = jax.tree_util.keystr(path, simple=True, separator="/")
        if not set(names) - {"layers"}:  # which scanning adds
            raise UserError(
                f"the axes of parameter {parameter} have no names",
                "Create it with nn.with_logical_partitioning(init, names)",
            )
        for name in names:
            if name not in table:
                raise UserError(
                    f"parameter {parameter} has an axis {name!r} that no rule names",
                    "Name it in STORAGE, in gpt2/parallel/rules.py",
                )
        return spec(tuple(names), table)

    return jax.tree_util.tree_map_with_path(
        to_mesh, logical_axes, is_leaf=lambda node: isinstance(node, PartitionSpec)
    )


@contextlib.contextmanager
def spread_activations(mesh: Mesh) -> Iterator[None]:
    """Makes `constrain` spread activations over `mesh` for what is traced inside."""
    token = _mesh.set(mesh)
    try:
        with traced_for(mesh.devices.flat[0], splits=mesh.shape["tensor"] > 1):
            yield
    finally:
        _mesh.reset(token)


@contextlib.contextmanager
def holding_pieces() -> Iterator[None]:
    """Says that what is traced inside holds pieces of parameters, for `pieces_of`."""
    token = _has_pieces.set(True)
    try:
        yield
    finally:
        _has_pieces.reset(token)


def gathered_for(params: Any, micro_batch: Any) -> Any:
    """Returns parameters whose pieces are gathered for this micro-batch, and not once for all."""
    if not _has_pieces.get():
        return params
    return jax.lax.optimization_barrier((params, micro_batch))[0]


def pieces_of(names: tuple[str, ...], *, forget: bool = False) -> Pieces | None:
    """Returns how the traced program holds a parameter of which each device has a piece.

    Args:
        names: of the parameter's axes, as the model declares them.
        forget: see `Pieces`.

    Returns:
        None if the parameter is whole.
    """
    mesh = _mesh.get()
    if mesh is None or not _has_pieces.get() or (axis := gathered_axis(names, mesh)) is None:
        return None
    compute = spec(names, COMPUTE)
    is_spread = mesh.shape["tensor"] > 1 and any(compute)
    return Pieces(axis, fsdp_stages(mesh), forget, on_trace(mesh, compute) if is_spread else None)


def fsdp_stages(mesh: Mesh) -> tuple[int, ...]:
    """Returns the number of devices along `fsdp`, in factors: see `Pieces`."""
    return torus_sides(mesh.devices[0, :, 0])


def gathered_axis(names: tuple[str, ...], mesh: Mesh) -> int | None:
    """Returns which axis of a parameter is gathered over `fsdp` where a layer uses it, or None.

    It is that of every kernel and table. Vectors are too small to be worth it. A table whose
    columns are split over `tensor` too is left whole, like them.
    """
    split = [axis for axis, name in enumerate(names) if "fsdp" in STORAGE[name]]
    if mesh.shape["fsdp"] == 1 or not split or len(set(names) - {"layers"}) < 2:
        return None
    others = (mesh.shape[axis] for axis in STORAGE[names[split[0]]] if axis != "fsdp")
    return split[0] if all(size == 1 for size in others) else None


def is_spread(name: str) -> bool:
    """Returns whether the traced program splits activations' axes of this name over devices."""
    mesh = _mesh.get()
    return mesh is not None and any(mesh.shape[axis] > 1 for axis in ACTIVATIONS[name])


def vocab_multiple() -> int:
    """Returns the number to a multiple of which the traced head pads its vocabulary.

    It is 1 on a CPU that keeps the vocabulary whole: padding would only cost passes over the
    logits there.
    """
    whole = not is_spread("vocab")
    return 1 if whole and platform() == "cpu" else VOCAB_MULTIPLE


def constrain(x: jax.Array, *names: str) -> jax.Array:
    """Spreads an activation by the names of its axes; does nothing where none can be split."""
    mesh = _mesh.get()
    if mesh is None or mesh.shape["tensor"] == 1:
        return x
    return jax.lax.with_sharding_constraint(x, on_trace(mesh, spec(names, ACTIVATIONS)))


def on_trace(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """Returns the sharding of an array in the current trace, which may be that of one device."""
    abstract = jax.sharding.get_abstract_mesh()
    return NamedSharding(mesh if abstract.empty else abstract, spec)


def map_devices(function: Callable, names: tuple[str, ...], constant_names: Any) -> Callable:
    """Returns `function`, made to run on each device's part of its arguments.

    It is for kernels that XLA cannot split. Where nothing is split, `function` is returned as it
    is.

    Args:
        function: `function(arrays, constants) -> array`, where `arrays` is a tuple of activations
            and `constants` is a tuple of arrays, without gradients, or None.
        names: of the axes of each of `arrays`, and of the result.
        constant_names: of the axes of each of `constants`.
    """
    mesh = _mesh.get()
    if mesh is None or mesh.shape["tensor"] == 1:
        return function
    array = spec(names, ACTIVATIONS)
    constant = tuple(spec(names, ACTIVATIONS) for names in constant_names)
    return jax.shard_map(
        function,
        mesh=on_trace(mesh, array).mesh,
        in_specs=(array, constant),
        out_specs=array,
        axis_names={"tensor"},
        check_vma=False,
    )


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

    The matrices of a stack are dealt out over all mesh axes and come back stored by `matrix_spec`.
    Each crosses the network once on its way in and once on its way out: in an all-to-all over the
    axes that split it, and in an all-gather over the others, on its way out only. `function` sends
    nothing. Outside a mesh, it is called as it is.

    Args:
        function: maps a tree of arrays `[S, ?, ?]` to another one, for matrices that know nothing
            of each other. It sees a part of the stack, filled up with zeros.
        stacks: a tree of arrays `[S, rows, columns]`, all of the same S.
        scalars: arrays `[]`, the same on all devices.
    """
    mesh = _mesh.get()
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
