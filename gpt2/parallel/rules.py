"""From logical axes to mesh axes: the one table that says how everything is spread.

The model names the axes of its parameters and activations by meaning (`embed`, `mlp`, `heads`,
`vocab`, ...). Two mappings give those names a place on the mesh: `STORAGE` for parameters and
optimizer state between steps, `COMPUTE` for parameters and activations inside a step. FSDP is the
difference between the two: a row that stores over `fsdp` and computes whole.
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
# divides over devices. Parameters, logits and losses only ever have the true size.
VOCAB_MULTIPLE = 128

# Logical axis -> mesh axes that split it. `table` is the width of an embedding table: its rows
# (50257 of them, or a context length) divide by nothing, so tables are stored by columns.
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

_mesh: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh", default=None)


def spec(names: tuple[str, ...], table: Mapping[str, tuple[str, ...]]) -> PartitionSpec:
    """Returns the mesh axes of an array whose axes are called `names`.

    Raises:
        KeyError: a name that no row of the table knows.
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
    """While a model is traced inside, `constrain` spreads activations over `mesh`."""
    token = _mesh.set(mesh)
    try:
        yield
    finally:
        _mesh.reset(token)


def is_spread(name: str) -> bool:
    """Says whether activations' axes of this name are split over devices, where it is traced."""
    mesh = _mesh.get()
    return mesh is not None and any(mesh.shape[axis] > 1 for axis in ACTIVATIONS[name])


def vocab_multiple() -> int:
    """Returns what the head's vocabulary is padded to a multiple of, where it is computed now.

    A CPU that keeps the vocabulary whole needs no padding, and pays for it with passes over the
    logits.
    """
    whole = not is_spread("vocab")
    return 1 if whole and jax.default_backend() == "cpu" else VOCAB_MULTIPLE


def constrain(x: jax.Array, *names: str) -> jax.Array:
    """Spreads an activation by the names of its axes; does nothing outside a mesh."""
    mesh = _mesh.get()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(names, ACTIVATIONS)))


def map_devices(
    function: Callable, names: tuple[str, ...], constant_names: tuple[str, ...]
) -> Callable:
    """Calls a function with each device's part of activations: for kernels that XLA cannot split.

    Args:
        function: `function(arrays, constants) -> array`. Outside a mesh it is returned as it is.
        names: of the axes of each of `arrays`, a tuple, and of the result.
        constant_names: of the axes of `constants`, to which nothing is differentiated, or None.
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

    # JAX's own derivative of a shard_map adds up over mesh axes that its inputs do not name, and
    # so over those of the batch, which only the backend's vmap gives them. Here every device
    # differentiates by itself, at the price of computing `function` again.
    def backward(residuals, gradient):
        def pull_back(arrays, constants, gradient):
            return jax.vjp(lambda arrays: function(arrays, constants), arrays)[1](gradient)[0]

        mapped_back = map_over(pull_back, in_specs=(array, constant, array))
        return mapped_back(*residuals, gradient), None

    mapped.defvjp(forward, backward)
    return mapped
