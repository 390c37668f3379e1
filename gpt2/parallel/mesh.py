"""The mesh of devices: its axes, their sizes, and which rows of a batch each process holds."""

import math

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gpt2.config import Config, ModelConfig, ParallelConfig, propose_batch
from gpt2.errors import UserError
from gpt2.parallel.rules import BATCH_AXES, MESH_AXES, VOCAB_MULTIPLE, Rules
from gpt2.utils.text import counted


def make_mesh(parallel: ParallelConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """Returns the mesh with axes `data`, `fsdp`, `tensor`, in the order of the hardware's links.

    Raises:
        UserError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(parallel, len(devices))
    return jax.make_mesh(
        tuple(sizes.values()),
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
        devices=devices,
    )


def describe_mesh(mesh: Mesh) -> str:
    """Returns the axes of a mesh and their sizes: `data 1 x fsdp 8 x tensor 1`."""
    return " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())


def mesh_sizes(
    parallel: ParallelConfig,
    num_devices: int,
    model: ModelConfig | None = None,
    *,
    present: str = "",
) -> dict[str, int]:
    """Returns the size of every mesh axis, with -1 resolved to the rest.

    Args:
        parallel: the wanted sizes.
        num_devices: how many devices there are.
        model: if given, an error proposes only what the model splits over.
        present: the platform of devices that are here, for advice on others; empty if they are not.

    Raises:
        UserError: the sizes do not multiply to `num_devices`.
    """
    sizes = parallel.sizes
    fixed = math.prod(size for size in sizes.values() if size != -1)
    rest = [axis for axis in MESH_AXES if sizes[axis] == -1]
    if rest and num_devices % fixed == 0:
        sizes[rest[0]], fixed = num_devices // fixed, num_devices
    if fixed == num_devices:
        axis = parallel.strategy_axis
        if axis and sizes[axis] == 1 < num_devices:
            raise UserError(
                f"parallel.strategy={parallel.strategy} has nothing to split: parallel.data="
                f"{sizes['data']} leaves one device along parallel.{axis}",
                _propose(parallel, num_devices, model),
            )
        return sizes
    given = " x ".join(f"parallel.{axis}={size}" for axis, size in sizes.items() if size > 1)
    if rest and fixed < num_devices:
        what = f"{given} does not divide {counted(num_devices, 'device')}"
    else:
        what = (
            f"{given or 'parallel.data=1'} takes {counted(fixed, 'device')}; found: {num_devices}"
        )
    how = _propose(parallel, num_devices, model)
    if present == "cpu" and jax.process_count() == 1 and fixed > num_devices:
        how += (
            f", or XLA_FLAGS=--xla_force_host_platform_device_count={fixed} to simulate {fixed} "
            "devices"
        )
    if present and fixed > num_devices:
        how += f"; train.py --plan_devices={fixed} plans for them"
    raise UserError(what, how)


def batch_shards(parallel: ParallelConfig, num_devices: int) -> int:
    """Returns over how many devices the rows of a batch are split.

    Raises:
        UserError: as in `mesh_sizes`.
    """
    sizes = mesh_sizes(parallel, num_devices)
    return sizes["data"] * sizes["fsdp"]


def check_layout(
    config: Config, model: ModelConfig, num_devices: int, *, present: str = ""
) -> None:
    """Checks that the model and the batch divide over the mesh.

    Args:
        config: the options.
        model: those of the model.
        num_devices: how many devices there are.
        present: as for `mesh_sizes`.

    Raises:
        UserError: they do not divide; the message names the nearest sizes that work.
    """
    sizes = mesh_sizes(config.parallel, num_devices, model, present=present)
    if misfit := _misfit(model, sizes, config.parallel):
        raise UserError(misfit, _propose(config.parallel, num_devices, model))
    shards = sizes["data"] * sizes["fsdp"]
    micro_batches, batch_size = config.train.accumulate_steps, config.data.batch_size
    if batch_size % (shards * micro_batches):
        raise UserError(
            f"data.batch_size={batch_size} does not split over parallel.data={sizes['data']} x "
            f"parallel.fsdp={sizes['fsdp']} x train.accumulate_steps={micro_batches}",
            propose_batch(batch_size, micro_batches, shards),
        )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch's rows."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def local_rows(sharding: NamedSharding, batch_size: int) -> slice:
    """Returns the rows of the global batch that this process's devices hold.

    Raises:
        UserError: the rows do not follow one another.
    """
    indices = sharding.addressable_devices_indices_map((batch_size,)).values()
    parts = sorted({index[0].indices(batch_size)[:2] for index in indices if index is not None})
    start, stop = parts[0][0], parts[-1][1]
    held = sum(part_stop - part_start for part_start, part_stop in parts)
    if held != stop - start:
        raise UserError(
            f"process {jax.process_index()} holds {held} rows of the batch, scattered among "
            f"{stop - start}: {', '.join(f'{first} to {last - 1}' for first, last in parts)}",
            "Give each process a block of devices, by other sizes of --config.parallel.data, fsdp "
            "and tensor",
        )
    return slice(start, stop)


def _misfit(model: ModelConfig, sizes: dict[str, int], parallel: ParallelConfig) -> str | None:
    """Returns which dimension of the model the mesh does not divide, as text, or None."""
    rules = Rules.from_config(parallel)
    activations = rules.activations
    table = {**rules.optimizer, "sequence": activations["sequence"], "rows": activations["vocab"]}
    for row, name, dim in (
        ("heads", "model.num_heads", model.num_heads),
        ("heads", "model.num_kv_heads", model.kv_heads),
        ("mlp", "the MLP's width", model.hidden_dim),
        ("rows", "the multiple that the vocabulary is padded to", VOCAB_MULTIPLE),
        ("table", "model.embed_dim", model.embed_dim),
        ("embed", "model.embed_dim", model.embed_dim),
        ("norm", "model.embed_dim", model.embed_dim),
        ("vocab", "model.vocab_size", model.vocab_size),
        ("position", "model.context_length", model.context_length * (model.position == "learned")),
        ("sequence", "model.context_length", model.context_length),
        (
            "table",
            "the value embeddings' width",
            model.kv_heads * model.head_size * model.value_embeddings,
        ),
    ):
        over = [axis for axis in reversed(table[row]) if sizes[axis] > 1]
        if dim % math.prod(sizes[axis] for axis in over):
            devices = " x ".join(f"parallel.{axis}={sizes[axis]}" for axis in over)
            return f"{name}={dim} does not split over {devices}"
    return None


def all_sizes(parallel: ParallelConfig, num_devices: int) -> list[dict[str, int]]:
    """Returns every mesh that `num_devices` can make under the chosen backend and strategy."""
    if parallel.backend == "pmap" or parallel.strategy == "ddp":
        return [{"data": num_devices, "fsdp": 1, "tensor": 1}]
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    meshes = [
        {"data": num_devices // (fsdp * tensor), "fsdp": fsdp, "tensor": tensor}
        for fsdp in divisors
        for tensor in divisors
        if num_devices % (fsdp * tensor) == 0
    ]
    axis = parallel.strategy_axis  # which takes all devices while its size is 1
    return [sizes for sizes in meshes if axis is None or num_devices == 1 or sizes[axis] > 1]


def data_parallel_flags() -> str:
    """Returns the flags that spread any model: by data alone, whatever else is set."""
    sizes = {"data": -1, "fsdp": 1, "tensor": 1}
    flags = ["--config.parallel.strategy=ddp"]
    return " ".join(flags + [f"--config.parallel.{axis}={n}" for axis, n in sizes.items()])


def _propose(parallel: ParallelConfig, num_devices: int, model: ModelConfig | None) -> str:
    """Returns the flags for the mesh nearest to the wanted one, factor by factor."""
    meshes = all_sizes(parallel, num_devices)
    fitting = [sizes for sizes in meshes if model is None or not _misfit(model, sizes, parallel)]
    if not fitting:
        return "Use " + data_parallel_flags()
    wanted = parallel.sizes

    def distance(sizes: dict[str, int]) -> float:
        fixed = (axis for axis in MESH_AXES if wanted[axis] != -1)
        return sum(abs(math.log(sizes[axis] / wanted[axis])) for axis in fixed)

    nearest = min(fitting, key=distance)
    changed = [
        axis
        for axis in MESH_AXES
        if nearest[axis] != wanted[axis] and (axis, wanted[axis]) != ("data", -1)
    ]
    return "Use " + " ".join(f"--config.parallel.{axis}={nearest[axis]}" for axis in changed)
