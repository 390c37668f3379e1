"""Map logical axes of arrays to axes of the mesh.

The model names the axes of its parameters and activations by meaning (`embed`, `mlp`, `heads`,
`vocab`, ...). `Rules` map these names to mesh axes, according to the options `parallel.rules` and
`parallel.strategy`. There are separate tables for parameters between steps (`storage`), for
optimizer state, for parameters inside a step (`compute`), and for activations. With FSDP, `storage`
splits parameters over the mesh axis `fsdp`, and `compute` does not.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gpt2.config import ParallelConfig, RulesConfig
from gpt2.errors import UserError
from gpt2.ops.fsdp import Shards, torus_sides
from gpt2.utils.parameters import STACKING
from gpt2.utils.trees import Tree

# Axes of the mesh, outermost first. `data` and `fsdp` both split the batch.
MESH_AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

# Axes of parameters that are never split, because they are short, or because each index along them
# selects another kernel.
WHOLE = ("layers", "qkv", "head_size", "mix")

# Parameters that are split along one of these axes may be gathered by layer, because products and
# lookups support such shards (gpt2/ops/fsdp.py).
GATHERED_BY_LAYER = ("embed", "table")

Table = Mapping[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Rules:
    """Tables from logical axes to the mesh axes that split them, outermost first.

    Attributes:
        strategy: the value of `parallel.strategy` that the tables implement.
        storage: table for parameters between steps.
        optimizer: table for the optimizer's state, which has the same axes as the parameters.
        compute: table for parameters inside a step, which are gathered over `fsdp`.
        activations: table for activations, and for the output head, whose rows are padded to a
            multiple of `VOCAB_MULTIPLE` (gpt2/parallel/kernels.py). The table does not split the
            batch axis, because the model already runs on the rows of one device.
    """

    strategy: str
    storage: Table
    optimizer: Table
    compute: Table
    activations: Table

    @classmethod
    def from_config(cls, parallel: ParallelConfig) -> "Rules":
        """Return the rules for the options in `parallel`."""
        table: dict[str, tuple[str, ...]] = dict.fromkeys(WHOLE, ())
        for field in dataclasses.fields(RulesConfig):
            axes = getattr(parallel.rules, field.name)
            table[field.name] = () if axes == "none" else tuple(axes.split(","))
        if parallel.strategy == "megatron":
            table["sequence"] = ("tensor",)
        rules = cls.from_table(table, parallel.strategy)
        activations = {
            "batch": (),
            "length": (),
            "embed": (),
            "vocab": ("tensor",),
            "rows": rules.compute["vocab"],
        }
        return dataclasses.replace(rules, activations={**rules.compute, **activations})

    @classmethod
    def from_table(cls, table: Table, strategy: str = "auto") -> "Rules":
        """Return rules from one table, which must contain all logical axes of the model.

        The whole table applies to the optimizer's state, and to parameters between steps. Inside a
        step, its entries for `fsdp` do not apply to parameters. With the strategy `zero1`, they do
        not apply to parameters between steps either.
        """
        compute = {}
        for name, axes in table.items():
            compute[name] = tuple(axis for axis in axes if axis != "fsdp")
        storage = compute if strategy == "zero1" else table
        return cls(strategy, storage, table, compute, activations=compute)


def spec(names: tuple[str, ...], table: Table) -> PartitionSpec:
    """Return the mesh axes that split an array whose logical axes are `names`.

    `table` maps logical axes to mesh axes. Raise a UserError if a name is not in the table. As in
    Flax, a mesh axis splits only the first logical axis that is mapped to it: for example the
    experts, but not the hidden units of each expert.
    """
    taken = set[str]()
    entries = []
    for name in names:
        if name not in table:
            raise UserError(
                f"A parameter has the axis {name!r}, for which there is no rule",
                f"Use another axis, or add {name} to parallel.rules or to WHOLE in "
                "parallel/rules.py",
            )
        axes = tuple(axis for axis in table[name] if axis not in taken)
        taken.update(axes)
        entries.append(axes)
    return PartitionSpec(*entries)


def specs(logical_axes: Tree, table: Table) -> Tree:
    """Return a tree of PartitionSpecs of mesh axes, given a tree of PartitionSpecs of logical axes.

    `table` maps logical axes to mesh axes.
    """
    return jax.tree.map(lambda names: spec(tuple(names), table), logical_axes)


def fsdp_stages(mesh: Mesh) -> tuple[int, ...]:
    """Return the stages of a reduce-scatter over the axis `fsdp`: factors of the axis's size.

    The factors are the sides of the torus that the devices fill. If they do not fill a torus, the
    size itself is the only factor.
    """
    return torus_sides(mesh.devices[0, :, 0])


def gathered_axis(names: tuple[str, ...], mesh: Mesh, rules: Rules) -> int | None:
    """Return the axis along which a parameter may be gathered by layer, or None if it may not.

    With `parallel.fsdp_gather=layer`, such a parameter is gathered where a layer uses it. A
    parameter may be gathered by layer only if `fsdp` splits it over several devices, along one of
    the axes in `GATHERED_BY_LAYER`, and if the axis `tensor` of the mesh has one device. Vectors
    are never gathered by layer, because they are too small. `names` are the parameter's logical
    axes.
    """
    split = [axis for axis, name in enumerate(names) if "fsdp" in rules.storage[name]]
    if not split or mesh.shape["fsdp"] == 1 or mesh.shape["tensor"] > 1:
        return None
    is_vector = len(set(names) - STACKING) < 2
    axis = split[0]
    if is_vector or names[axis] not in GATHERED_BY_LAYER:
        return None
    return axis


def find_shards(
    names: tuple[str, ...],
    *,
    mesh: Mesh,
    rules: Rules,
    forget: bool,
) -> Shards | None:
    """Return how a parameter is split into shards, or None if it is not gathered by layer.

    `names` are the parameter's logical axes. With `forget`, an optimization barrier makes XLA
    gather the parameter again in the backward pass (see `Shards`).
    """
    axis = gathered_axis(names, mesh, rules)
    if axis is None:
        return None
    return Shards(axis, fsdp_stages(mesh), forget)


def constrain(
    x: Array,
    *names: str,
    mesh: Mesh,
    rules: Rules,
) -> Array:
    """Shard an activation over `tensor`, according to the logical names of its last axes."""
    wanted = spec(names, rules.activations)
    others = [None] * (x.ndim - len(names))
    return jax.lax.with_sharding_constraint(
        x, on_trace(mesh, PartitionSpec(*others, *wanted))
    )


def on_trace(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """Return `spec` as a sharding over `mesh`, in a form that the current trace accepts.

    Inside a `shard_map`, JAX accepts only shardings over the abstract mesh of this `shard_map`.
    """
    abstract = jax.sharding.get_abstract_mesh()
    return NamedSharding(mesh if abstract.empty else abstract, spec)


# Logical axes of queries, keys, values and the result of attention.
_HEADS = ("batch", "length", "heads", "head_size")


def map_devices(kernel: Callable, *, mesh: Mesh, rules: Rules) -> Callable:
    """Wrap `kernel(q, k, v, segments)` so that each device runs it on the heads that it holds.

    This is necessary because XLA's partitioner cannot split library kernels such as cuDNN's.
    """
    heads = spec(_HEADS, rules.activations)
    segments = spec(_HEADS[:2], rules.activations)
    return jax.shard_map(
        kernel,
        mesh=on_trace(mesh, heads).mesh,
        in_specs=(heads, heads, heads, segments),
        out_specs=heads,
        axis_names={"tensor"},
        check_vma=False,
    )
