"""Devices that are not here, to compile for: slices of TPUs, and machines of NVIDIA GPUs.

XLA compiles for them on any x86 machine with Linux, if libtpu or JAX's plugin for CUDA is
installed. It runs nothing there.
"""

import os
from pathlib import Path
from typing import NamedTuple

import jax
from jax.experimental.topologies import get_topology_desc

from gpt2.errors import UserError

# JAX devices of the smallest and the largest slice, and the dimensions of its torus.
_TPUS = {
    "v2": (8, 512, 2),
    "v3": (8, 512, 2),
    "v4": (4, 512, 3),
    "v5p": (4, 512, 3),
    "v5e": (1, 256, 2),
    "v6e": (1, 256, 2),
}
_GPUS_OF_A_MACHINE = 8


class _Gpu(NamedTuple):
    """What XLA asks of a GPU, from NVIDIA's data sheets and the CUDA programming guide."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    clock_ghz: float
    memory: int  # bytes
    bandwidth: int  # GB/s
    cache: int  # MiB, level 2
    shared_memory: int  # KiB, of a multiprocessor
    threads: int = 2048  # of a multiprocessor


_GB = 10**9
_GIB = 2**30
_GPUS = {
    "h100": _Gpu(
        "NVIDIA H100 80GB HBM3",
        (9, 0),
        132,
        1.98,
        80 * _GIB,
        3352,
        50,
        228,
    ),
    "h200": _Gpu("NVIDIA H200", (9, 0), 132, 1.98, 141 * _GB, 4800, 50, 228),
    "a100": _Gpu(
        "NVIDIA A100-SXM4-80GB",
        (8, 0),
        108,
        1.41,
        80 * _GIB,
        2039,
        40,
        164,
    ),
    "l4": _Gpu("NVIDIA L4", (8, 9), 58, 2.04, 24 * _GB, 300, 48, 100, 1536),
    "t4": _Gpu("Tesla T4", (7, 5), 40, 1.59, 16 * _GB, 320, 4, 64, 1024),
    "4090": _Gpu(
        "NVIDIA GeForce RTX 4090",
        (8, 9),
        128,
        2.52,
        24 * _GB,
        1008,
        72,
        100,
        1536,
    ),
}


# Of compute capability 7.5 to 9.0, and of the libraries that JAX brings.
_ANY_GPU = """
  fpus_per_core: 128  device_address_bits: 64  pcie_bandwidth: 34359738368  ecc_enabled: true
  threads_per_warp: 32  threads_per_block_limit: 1024  shared_memory_per_block: 49152
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  driver_version: "13.0.0"  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"  dnn_version: "9.10.0"
"""


def find_devices(name: str) -> list[jax.Device]:
    """Returns so many JAX devices of a kind, `v5e-16` or `h100-8`, to compile for.

    A kind may be a file: XLA's description of a GPU, as the benchmark's suite writes it. Google's
    names for slices of v4 and v5p count cores, two in each device.
    """
    kind, _, digits = name.rpartition("-")
    number = int(digits) if digits.isdecimal() else 0
    if number > _GPUS_OF_A_MACHINE and number % _GPUS_OF_A_MACHINE:
        number = 0  # a machine has all of its own, and no slice of a TPU is so either
    if kind in _TPUS:
        least, most, dimensions = _TPUS[kind]
        if number.bit_count() == 1 and least <= number <= most:
            return _tpus(kind, number, dimensions)
    elif number and kind in _GPUS:
        return _gpus(_target(_GPUS[kind]), number)
    elif number and Path(kind).is_file():
        return _gpus(Path(kind).read_text(encoding="utf-8"), number)
    raise UserError(
        f"--plan_chips={name} names no devices",
        f"Use CHIP-N, such as v5e-8 or h100-8, with one of {', '.join([*_TPUS, *_GPUS])}",
    )


def _gpus(target: str, number: int) -> list[jax.Device]:
    machines = max(1, number // _GPUS_OF_A_MACHINE)
    topology = f"1x{machines}x{number // machines}"
    return _describe("cuda", "", topology=topology, target_config=target)


def _tpus(kind: str, number: int, dimensions: int) -> list[jax.Device]:
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",  # there is no server that describes this machine
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing runs, so others may compile too
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    # Chips of v2 and v3 have two devices each.
    chips = number // 2 if kind in ("v2", "v3") else number
    # The sides are powers of two, as equal as they can be.
    bits = chips.bit_length() - 1
    sides = [2 ** ((bits + i) // dimensions) for i in range(dimensions)]
    if sides == [1, 2, 2]:  # the chips of one host lie flat
        sides = [2, 2, 1]
    options: dict[str, object] = {}
    if kind == "v4":
        options["chip_config_name"] = "megacore"
    if chips == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    topology = f"{kind}:{'x'.join(map(str, sides))}"
    return _describe("tpu", topology, **options)


def _describe(platform: str, name: str, **options: object) -> list[jax.Device]:
    try:
        return list(get_topology_desc(name, platform, **options).devices)
    except Exception as error:  # of several kinds, by what is missing
        reason = str(error).strip().partition("\n")[0]
        extra = "plan-tpu" if platform == "tpu" else "plan-gpu"
        what = f"there is no compiler for {platform} devices here ({reason})"
        raise UserError(what, f"Install it: pip install -e '.[{extra}]'") from error


def _target(gpu: _Gpu) -> str:
    """Returns XLA's description of a GPU, as a text of its protocol buffer."""
    major, minor = gpu.capability
    feature = ""
    if major == 9:
        feature = " feature_extension: ACCELERATED_FEATURES"
    shared = gpu.shared_memory << 10
    return f"""
gpu_device_info {{
  name: "{gpu.name}"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: {major} minor: {minor}{feature} }}
  core_count: {gpu.multiprocessors}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory}
  memory_bandwidth: {gpu.bandwidth * _GB}
  l2_cache_size: {gpu.cache << 20}
  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {shared - 1024}
  threads_per_core_limit: {gpu.threads}
{_ANY_GPU.strip()}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.name}"
"""
