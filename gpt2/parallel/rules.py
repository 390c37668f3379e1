"""From logical axes to mesh axes: the tables that say how everything is spread.

The model names the axes of its parameters and activations by meaning (`embed`, `mlp`, `heads`,
`vocab`, ...). `Rules` map those names to mesh axes, as `parallel.rules.` and `parallel.strategy`
say: for parameters between steps (`storage`), for optimizer state, for parameters inside a step
(`compute`), and for activations. FSDP is the difference between `storage` and `compute`.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gpt2.config import ParallelConfig, RulesConfig
from gpt2.ops.fsdp import Shards, torus_sides
from gpt2.utils.trees import Tree

# Axes of the mesh, outermost first. `data` and `fsdp` both split the batch.
MESH_AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

# Axes that count tensors of equal shapes.
COUNTING = {"layers", "experts"}

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
        table: dict[str, tuple[str, ...]] = dict.fromkeys(WHOLE, ())
        for field in dataclasses.fields(RulesConfig):
            table[field.name] = parallel.rules.axes(field.name)
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
        """Returns the rules of any model whose parameters are stored as a table says."""
        compute = {
            name: tuple(a for a in axes if a != "fsdp") for name, axes in table.items()
        }
        storage = compute if strategy == "zero1" else table
        return cls(
            strategy,
            storage,
            table,
            compute,
            activations=compute,
        )


def spec(names: tuple[str, ...], table: Table) -> PartitionSpec:
    """Returns the mesh axes of an array whose axes are called `names`.

    A mesh axis splits the first that asks for it, as Flax's rules have it: experts before the
    hidden units of each. A name that the table lacks belongs to `parallel.rules`, or to `WHOLE`.
    """
    taken = set[str]()
    entries = []
    for name in names:
        axes = tuple(axis for axis in table[name] if axis not in taken)
        taken.update(axes)
        entries.append(axes)
    return PartitionSpec(*entries)


def specs(logical_axes: Tree, table: Table) -> Tree:
    """Maps a tree of logical axes (names in a PartitionSpec) to mesh axes, each by its rule."""
    return jax.tree.map(lambda names: spec(tuple(names), table), logical_axes)


def fsdp_stages(mesh: Mesh) -> tuple[int, ...]:
    """Returns the number of devices along `fsdp`, in factors: see `Shards`."""
    return torus_sides(mesh.devices[0, :, 0])


def gathered_axis(names: tuple[str, ...], mesh: Mesh, rules: Rules) -> int | None:
    """Returns which axis of a parameter is gathered over `fsdp` where a layer uses it, or None.

    It is that of every kernel and table, unless rules cut them along an axis for which no operation
    takes shards, or split them over `tensor` too. Vectors are too small to be worth it.
    """
    split = [axis for axis, name in enumerate(names) if "fsdp" in rules.storage[name]]
    if not split or mesh.shape["fsdp"] == 1 or mesh.shape["tensor"] > 1:
        return None
    is_vector = len(set(names) - COUNTING) < 2
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
    """Returns how devices hold a parameter whose axes have these names; None: whole."""
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
    """Spreads an activation by the names of its last axes, where `tensor` splits some."""
    wanted = spec(names, rules.activations)
    others = [None] * (x.ndim - len(names))
    return jax.lax.with_sharding_constraint(
        x, on_trace(mesh, PartitionSpec(*others, *wanted))
    )


def on_trace(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """Returns the sharding of an array in the current trace, which may be that of one device."""
    abstract = jax.sharding.get_abstract_mesh()
    return NamedSharding(mesh if abstract.empty else abstract, spec)


# The axes of queries, keys, values and the result of attention.
_HEADS = ("batch", "length", "heads", "head_size")


def map_devices(kernel: Callable, *, mesh: Mesh, rules: Rules) -> Callable:
    """Returns `kernel(q, k, v, segments)`, made to run on each device's heads.

    It is for kernels that XLA cannot split.
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
