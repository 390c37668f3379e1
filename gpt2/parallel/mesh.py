"""The mesh of devices: its axes, their sizes, and which rows of a batch each process holds."""

import math
import os

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from gpt2.config import Config, ParallelConfig
from gpt2.errors import UserError
from gpt2.parallel.rules import MESH_AXES, Rules


def find_devices(config: Config) -> list[jax.Device]:
    """Return all devices of a run, after checking that they can split batches and sequences.

    Raise a UserError if they cannot. On machines without accelerators, the CPU is split into
    `parallel.cpu_devices` devices.
    """
    split_cpu(config.parallel.cpu_devices)
    check_layout(config, jax.device_count())
    return jax.devices()


def split_cpu(number: int) -> None:
    """Split the CPU into `number` devices, unless XLA_FLAGS already splits it.

    Call this before JAX creates devices.
    """
    flag = "xla_force_host_platform_device_count"
    if number > 1 and flag not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", number)


def make_mesh(
    parallel: ParallelConfig, devices: list[jax.Device] | None = None
) -> Mesh:
    """Return the mesh `[data, fsdp, tensor]` of `devices`, by default of all devices.

    `jax.make_mesh` orders the devices so that collectives are fast on the hardware's network.
    """
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(parallel, len(devices))
    types = (AxisType.Auto,) * len(MESH_AXES)
    shape = tuple(sizes.values())
    return jax.make_mesh(shape, MESH_AXES, axis_types=types, devices=devices)


def describe_mesh(mesh: Mesh) -> str:
    """Return the axes of a mesh and their sizes: `mesh data=1 fsdp=8 tensor=1`."""
    sizes = " ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    return f"mesh {sizes}"


def mesh_sizes(parallel: ParallelConfig, num_devices: int) -> dict[str, int]:
    """Return the size of every mesh axis, with -1 replaced by the number of remaining devices.

    Raise a UserError if the product of the sizes is not `num_devices`.
    """
    sizes = parallel.sizes
    options = " x ".join(f"parallel.{name}={size}" for name, size in sizes.items())
    fixed = math.prod(size for size in sizes.values() if size != -1)
    rest = num_devices // (fixed or 1)
    for name, size in sizes.items():
        if size == -1:
            sizes[name] = rest
    if math.prod(sizes.values()) != num_devices:
        raise UserError(
            f"{options} does not make a mesh of {num_devices} devices",
            f"Choose sizes whose product is {num_devices}. One size may be -1, which stands for "
            "the remaining devices",
        )
    return sizes


def check_layout(config: Config, num_devices: int) -> None:
    """Raise a UserError if the mesh cannot split batches and sequences evenly.

    The run calls this before data are prepared, so the error appears early.
    """
    sizes = mesh_sizes(config.parallel, num_devices)
    shards = sizes["data"] * sizes["fsdp"] * config.train.accumulate_steps
    shapes = config.shapes.pieces.values()
    # Validation uses batches of `data.batch_size`, even if a schedule changes the training batches.
    batch_sizes = [config.data.batch_size]
    batch_sizes += [shape.batch_size for shape in shapes]
    for size in batch_sizes:
        if size % shards:
            raise UserError(
                f"A batch of {size} sequences is not divisible by parallel.data={sizes['data']} x "
                f"parallel.fsdp={sizes['fsdp']} x train.accumulate_steps="
                f"{config.train.accumulate_steps}",
                f"Use a data.batch_size, and sizes in train.batch_schedule, that are multiples of "
                f"{shards}",
            )
    split = Rules.from_config(config.parallel).activations["sequence"]
    parts = math.prod(sizes[axis] for axis in split)
    for shape in shapes:
        if shape.context_length % parts:
            raise UserError(
                f"A context of {shape.context_length} tokens is not divisible by "
                + " x ".join(f"parallel.{axis}={sizes[axis]}" for axis in split),
                "Use a model.context_length, and lengths in train.context_schedule, that are "
                f"multiples of {parts}",
            )


def local_rows(sharding: NamedSharding, batch_size: int) -> slice:
    """Return the slice of rows of a global batch that this process's devices hold.

    Raise a UserError if these rows are not contiguous.
    """
    held = set[int]()
    for index in sharding.addressable_devices_indices_map((batch_size,)).values():
        if index is not None:
            held.update(range(batch_size)[index[0]])
    start = min(held)
    stop = max(held) + 1
    if len(held) != stop - start:
        raise UserError(
            f"The devices of process {jax.process_index()} hold rows of the batch that are not "
            "contiguous",
            "Choose other sizes for parallel.data, parallel.fsdp and parallel.tensor",
        )
    return slice(start, stop)
