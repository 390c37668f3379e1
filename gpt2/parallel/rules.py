"""From logical axes to mesh axes: the tables that say how everything is spread.

The model names the axes of its parameters and activations by meaning (`embed`, `mlp`, `heads`,
`vocab`, ...). `Rules` map those names to mesh axes, as `parallel.rules.` and `parallel.strategy`
say: for parameters and optimizer state between steps, for parameters inside a step, and for
activations. FSDP is the difference between the first and the third.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gpt2.config import ParallelConfig, RulesConfig
from gpt2.errors import UserError
from gpt2.parallel.fsdp import Shards, torus_sides
from gpt2.utils.platform import kernels_for, platform_of, target, tracing

# Axes of the mesh, outermost first. `data` and `fsdp` both split the batch.
MESH_AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

# The head computes with a vocabulary padded to a multiple of this, which fills matrix units and
# divides over devices. Parameters, logits and losses always have the true size.
VOCAB_MULTIPLE = 128

# Axes of parameters that nothing splits: too short, or one index for each kernel.
WHOLE = ("layers", "qkv", "head_size", "mix")

# Axes that `fsdp` may gather by layer. Kernels and tables are cut along them so that a shard is
# what a product or a lookup can take (gpt2/ops/linear.py, fsdp.py).
GATHERED_BY_LAYER = ("embed", "table")

Table = Mapping[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Rules:
    """Logical axis -> mesh axes that split it, outermost first.

    Attributes:
        strategy: of `parallel.strategy`, which they carry out.
        storage: of parameters between steps.
        optimizer: of the optimizer's state, which has the axes of its parameters.
        compute: of parameters inside a step: as stored, gathered over `fsdp`.
        activations: of activations, and of the output head, whose rows are padded to a number that
            divides. The model sees the batch of one device (see pjit.py).
    """

    strategy: str
    storage: Table
    optimizer: Table
    compute: Table
    activations: Table

    @classmethod
    def from_config(cls, parallel: ParallelConfig) -> "Rules":
        """Returns the rules that the options ask for."""
        names = sorted(
            {each.name for each in dataclasses.fields(RulesConfig)} - {"sequence"}
        )
        table = dict.fromkeys(WHOLE, ()) | {
            name: parallel.rules.axes(name) for name in names
        }
        rules = cls.from_table(table, parallel.strategy)
        is_megatron = parallel.strategy == "megatron"
        activations = {
            "batch": (),
            "length": (),
            "sequence": ("tensor",) if is_megatron else parallel.rules.axes("sequence"),
            "embed": (),
            "vocab": ("tensor",),
            "rows": rules.compute["vocab"],
        }
        return dataclasses.replace(rules, activations={**rules.compute, **activations})

    @classmethod
    def from_table(cls, table: Table, strategy: str = "auto") -> "Rules":
        """Returns the rules of any model whose parameters are stored as a table says."""
        compute = {
            name: tuple(a for a in axes if a != "fsdp") for name, axes in table.items()
        }
        storage = compute if strategy == "zero1" else table
        return cls(strategy, storage, table, compute, activations=compute)


def spec(names: tuple[str, ...], table: Table) -> PartitionSpec:
    """Returns the mesh axes of an array whose axes are called `names`."""
    return PartitionSpec(*(table[name] for name in names))


def specs(logical_axes: Any, table: Table) -> Any:
    """Maps a tree of logical axes (names in a PartitionSpec) to mesh axes, each by its rule."""

    def to_mesh(path: Any, names: PartitionSpec) -> PartitionSpec:
        parameter = jax.tree_util.keystr(path, simple=True, separator="/")
        if not set(names) - {"layers"}:  # every device might hold it whole
            raise UserError(
                f"parameter {parameter} does not name its axes",
                "Name them by nn.with_logical_partitioning, as gpt2/model/layers.py does",
            )
        if unknown := [name for name in names if name not in table]:
            raise UserError(
                f"no rule says what splits axis {unknown[0]!r} of parameter {parameter}",
                "Add it to parallel.rules in configs/default.py, or to WHOLE in "
                "gpt2/parallel/rules.py if nothing splits it",
            )
        return spec(tuple(names), table)

    return jax.tree_util.tree_map_with_path(to_mesh, logical_axes, is_leaf=is_spec)


def is_spec(node: Any) -> bool:
    """Returns whether a node of a tree is a PartitionSpec, which is a tuple."""
    return isinstance(node, PartitionSpec)


@contextlib.contextmanager
def spread_over(mesh: Mesh, rules: Rules) -> Iterator[None]:
    """Makes `constrain` spread activations over `mesh` for what is traced inside."""
    device = mesh.devices.flat[0]
    sizes = mesh.shape
    about = dict(
        platform=platform_of(device), kernels=kernels_for(device), several=mesh.size > 1
    )
    with tracing(**about, splits_axes=sizes["tensor"] > 1, mesh=mesh, rules=rules):
        yield


def gathered_for(params: Any, micro_batch: Any) -> tuple[Any, Any]:
    """Returns both, so that shards are gathered for this micro-batch, and not once for all."""
    if not target().has_shards:
        return params, micro_batch
    return jax.lax.optimization_barrier((params, micro_batch))


def param_shards(names: tuple[str, ...], *, forget: bool = False) -> Shards | None:
    """Returns how the traced program holds a parameter of these axes in shards; None: whole."""
    mesh = target().mesh
    rules = target().rules
    axis = gathered_axis(names, mesh, rules) if target().has_shards else None
    if axis is None:
        return None
    return Shards(axis, fsdp_stages(mesh), forget)


def fsdp_stages(mesh: Mesh) -> tuple[int, ...]:
    """Returns the number of devices along `fsdp`, in factors: see `Shards`."""
    return torus_sides(mesh.devices[0, :, 0])


def gathered_axis(names: tuple[str, ...], mesh: Mesh, rules: Rules) -> int | None:
    """Returns which axis of a parameter is gathered over `fsdp` where a layer uses it, or None.

    It is that of every kernel and table, unless rules cut them along an axis for which no operation
    takes shards, or split them over `tensor` too. Vectors are too small to be worth it.
    """
    split = [axis for axis, name in enumerate(names) if "fsdp" in rules.storage[name]]
    is_whole = mesh.shape["fsdp"] == 1 or mesh.shape["tensor"] > 1
    if is_whole or not split or len(set(names) - {"layers"}) < 2:
        return None
    return split[0] if names[split[0]] in GATHERED_BY_LAYER else None


def vocab_multiple() -> int:
    """Returns the number to a multiple of which the traced head pads its vocabulary.

    It is 1 on a CPU that keeps the vocabulary whole: padding would only cost passes over the
    logits there.
    """
    return VOCAB_MULTIPLE if target().splits_axes or target().platform != "cpu" else 1


def constrain(x: jax.Array, *names: str) -> jax.Array:
    """Spreads an activation by the names of its axes; does nothing where none can be split."""
    trace = target()
    if not trace.splits_axes:
        return x
    wanted = spec(names, trace.rules.activations)
    return jax.lax.with_sharding_constraint(x, on_trace(trace.mesh, wanted))


def on_trace(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """Returns the sharding of an array in the current trace, which may be that of one device."""
    abstract = jax.sharding.get_abstract_mesh()
    return NamedSharding(mesh if abstract.empty else abstract, spec)


def map_devices(
    function: Callable, names: tuple[str, ...], other_names: Any
) -> Callable:
    """Returns `function`, made to run on each device's part of its arguments.

    It is for kernels that XLA cannot split. Where nothing is split, it is returned as it is.

    Args:
        function: `function(arrays, others) -> array`, where `arrays` is a tuple of activations and
            `others` is a tuple of arrays or None.
        names: of the axes of each of `arrays`, and of the result.
        other_names: of the axes of each of `others`.
    """
    trace = target()
    if not trace.splits_axes:
        return function
    table = trace.rules.activations
    array = spec(names, table)
    others = tuple(spec(names, table) for names in other_names)
    return jax.shard_map(
        function,
        mesh=on_trace(trace.mesh, array).mesh,
        in_specs=(array, others),
        out_specs=array,
        axis_names={"tensor"},
        check_vma=False,
    )
