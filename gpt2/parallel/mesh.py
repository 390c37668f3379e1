"""The mesh of devices: its axes, their sizes, and which rows of a batch each process holds."""

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gpt2.config import Config, ModelConfig, ParallelConfig
from gpt2.errors import UserError
from gpt2.parallel.rules import BATCH_AXES, MESH_AXES


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


def mesh_sizes(parallel: ParallelConfig, num_devices: int) -> dict[str, int]:
    """Returns the size of every mesh axis, with -1 resolved to the rest.

    Raises:
        UserError: the sizes do not multiply to `num_devices`.
    """
    sizes = {axis: getattr(parallel, axis) for axis in MESH_AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    rest = [axis for axis in MESH_AXES if sizes[axis] == -1]
    given = " x ".join(f"parallel.{axis}={size}" for axis, size in sizes.items() if size != 1)
    if rest and num_devices % fixed == 0:
        return sizes | {rest[0]: num_devices // fixed}
    if rest:
        axis = max((a for a in MESH_AXES if sizes[a] > 1), key=sizes.get)
        others = fixed // sizes[axis]
        nearest = _nearest_divisor(num_devices // math.gcd(num_devices, others), sizes[axis])
        raise UserError(
            f"{given} does not divide {num_devices} devices",
            f"Use --config.parallel.{axis}={nearest}, for one",
        )
    if fixed != num_devices:
        raise UserError(
            f"{given or 'parallel.data=1'} asks for {fixed} devices and there are {num_devices}",
            "Let one axis take the rest, as --config.parallel.data=-1",
        )
    return sizes


def check_layout(config: Config, model: ModelConfig, num_devices: int) -> None:
    """Checks that the model and the batch divide over the mesh.

    Raises:
        UserError: names the numbers, and the nearest that work.
    """
    sizes = mesh_sizes(config.parallel, num_devices)
    tensor, fsdp = sizes["tensor"], sizes["fsdp"]
    for option, dim, axis in (
        ("num_heads", model.num_heads, "tensor"),
        ("mlp_ratio x embed_dim", model.mlp_dim, "tensor"),
        ("embed_dim", model.embed_dim, "fsdp"),
    ):
        if dim % sizes[axis]:
            raise UserError(
                f"model.{option}={dim} does not split over parallel.{axis}={sizes[axis]}",
                f"Use --config.parallel.{axis}={_nearest_divisor(dim, sizes[axis])}, for one",
            )
    if model.embed_dim % (tensor * fsdp):
        raise UserError(
            f"model.embed_dim={model.embed_dim} does not split over parallel.tensor={tensor} "
            f"x parallel.fsdp={fsdp}, as the embedding tables are stored",
            f"Use --config.parallel.fsdp={_nearest_divisor(model.embed_dim // tensor, fsdp)}",
        )
    if 128 % tensor:
        raise UserError(
            f"the vocabulary, padded to a multiple of 128, does not split over "
            f"parallel.tensor={tensor}",
            f"Use --config.parallel.tensor={_nearest_divisor(128, tensor)}",
        )
    shards = sizes["data"] * fsdp
    micro_batches = config.train.accumulate_steps
    batch_size = config.data.batch_size
    if batch_size % (shards * micro_batches):
        nearest = max(1, round(batch_size / (shards * micro_batches))) * shards * micro_batches
        raise UserError(
            f"data.batch_size={batch_size} does not split over parallel.data={sizes['data']} x "
            f"parallel.fsdp={fsdp} x train.accumulate_steps={micro_batches}",
            f"Use --config.data.batch_size={nearest}",
        )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch's rows."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def local_rows(sharding: NamedSharding, batch_size: int) -> slice:
    """Returns the rows of the global batch that this process's devices hold."""
    indices = sharding.addressable_devices_indices_map((batch_size,)).values()
    bounds = np.array([index[0].indices(batch_size)[:2] for index in indices])
    return slice(int(bounds[:, 0].min()), int(bounds[:, 1].max()))


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    return min(divisors, key=lambda n: abs(n - wanted))
