"""From logical axes to mesh axes: the tables that say how everything is spread.

The model names the axes of its parameters and activations by meaning (`embed`, `mlp`, `heads`,
`vocab`, ...). Three tables map those names to mesh axes: `STORAGE` for parameters and optimizer
state between steps, `COMPUTE` for parameters inside a step, and `ACTIVATIONS`. FSDP is the
difference between the first two: a row that stores over `fsdp` and computes whole.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gpt2.errors import UserError

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
}

# Parameters inside a step: as stored, gathered over `fsdp`.
COMPUTE = {name: tuple(a for a in axes if a != "fsdp") for name, axes in STORAGE.items()}

# Activations, and the output head, whose rows are padded to a number that divides. The batch is
# already split when the model sees it (see pjit.py).
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

# Where the traced program will run: a mesh that splits activations, and the kind of its devices.
_mesh: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh", default=None)
_platform: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)


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
        with traced_for(mesh.devices.flat[0]):
            yield
    finally:
        _mesh.reset(token)


@contextlib.contextmanager
def traced_for(device: jax.Device) -> Iterator[None]:
    """Makes `platform` that of `device` for what is traced inside."""
    token = _platform.set(platform_of(device))
    try:
        yield
    finally:
        _platform.reset(token)


def platform_of(device: jax.Device) -> str:
    """Returns `cpu`, `gpu` or `tpu`: devices that are compiled for from afar say `cuda`."""
    return "gpu" if device.platform in ("cuda", "rocm") else device.platform


def platform() -> str:
    """Returns `cpu`, `gpu` or `tpu`: where the traced program will run.

    A backend sets it. Outside of a backend it is where JAX runs by default.
    """
    return _platform.get() or jax.default_backend()


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
    """Spreads an activation by the names of its axes; does nothing outside a mesh."""
    mesh = _mesh.get()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(names, ACTIVATIONS)))


def map_devices(
    function: Callable, names: tuple[str, ...], constant_names: tuple[str, ...]
) -> Callable:
    """Returns `function`, made to run on each device's part of its arguments.

    It is for kernels that XLA cannot split. Outside a mesh, `function` is returned as it is.

    Args:
        function: `function(arrays, constants) -> array`, where `arrays` is a tuple of activations
            and `constants` is an array, without a gradient, or None.
        names: of the axes of each of `arrays`, and of the result.
        constant_names: of the axes of `constants`.
    """
    mesh = _mesh.get()
    if mesh is None or mesh.size == 1:
        return function
    array, constant = spec(names, ACTIVATIONS), spec(constant_names, ACTIVATIONS)
    map_over = partial(jax.shard_map, mesh=mesh, out_specs=array, check_vma=False)

    @jax.custom_vjp
    def mapped(arrays, constants):
        return map_over(function, in_specs=(array, constant))(arrays, constants)

    def forward(arrays, constants):
        return mapped(arrays, constants), (arrays, constants)

    # JAX's own derivative of a shard_map adds up over mesh axes that its inputs do not name. These
    # would include the axes of the batch, which only the backend's vmap names. Here every device
    # differentiates its own part instead, and therefore computes `function` again.
    def backward(residuals, gradient):
        def pull_back(arrays, constants, gradient):
            return jax.vjp(lambda arrays: function(arrays, constants), arrays)[1](gradient)[0]

        mapped_back = map_over(pull_back, in_specs=(array, constant, array))
        return mapped_back(*residuals, gradient), None

    mapped.defvjp(forward, backward)
    return mapped
