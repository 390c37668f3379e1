"""Devices that are not here, to compile for: slices of TPUs, and machines of NVIDIA GPUs.

XLA compiles for them on any x86 machine with Linux, if libtpu or JAX's plugin for CUDA is
installed. It runs nothing there.
"""

import difflib
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental.topologies import get_topology_desc

from gpt2.errors import UserError

# Chips along each side of a slice, by the number of JAX devices.
_Sides = dict[int, tuple[int, ...]]
_FLAT: _Sides = {
    **{1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8)},
    **{128: (8, 16), 256: (16, 16)},
}
_DEEP: _Sides = {
    **{4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4), 64: (4, 4, 4)},
    **{128: (4, 4, 8), 256: (4, 8, 8), 512: (8, 8, 8)},
}
_TPUS: dict[str, _Sides] = {
    "v2": {n * 2: sides for n, sides in _FLAT.items() if n > 1},  # two devices in each chip
    "v3": {n * 2: sides for n, sides in _FLAT.items() if n > 1},
    "v4": _DEEP,
    "v5e": _FLAT,
    "v5p": _DEEP,
    "v6e": _FLAT,
}
_GPUS_OF_A_MACHINE = 8


class _Gpu(NamedTuple):
    """What XLA asks of a GPU, from NVIDIA's data sheets and the CUDA programming guide."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    clock_ghz: float
    memory: int  # bytes
    bandwidth: int  # bytes/s
    cache: int  # bytes, level 2
    shared_memory: int  # bytes, of a multiprocessor
    threads: int = 2048  # of a multiprocessor


_GPUS = {
    "h100": _Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98, 80 << 30, 3352 * 10**9, 50 << 20, 228),
    "h200": _Gpu("NVIDIA H200", (9, 0), 132, 1.98, 141 * 10**9, 4800 * 10**9, 50 << 20, 228),
    "a100": _Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41, 80 << 30, 2039 * 10**9, 40 << 20, 164),
    "a100-40gb": _Gpu(
        *("NVIDIA A100-SXM4-40GB", (8, 0), 108, 1.41),
        *(40 << 30, 1555 * 10**9, 40 << 20, 164),
    ),
    "l4": _Gpu("NVIDIA L4", (8, 9), 58, 2.04, 24 * 10**9, 300 * 10**9, 48 << 20, 100, 1536),
    "a10": _Gpu("NVIDIA A10G", (8, 6), 80, 1.71, 24 * 10**9, 600 * 10**9, 6 << 20, 100, 1536),
    "4090": _Gpu(
        *("NVIDIA GeForce RTX 4090", (8, 9), 128, 2.52),
        *(24 * 10**9, 1008 * 10**9, 72 << 20, 100, 1536),
    ),
}


def find_devices(name: str) -> list[jax.Device]:
    """Returns devices of a kind and number, such as `v5e-16` or `h100-8`, to compile for.

    A kind that ends with .txtpb is a file: XLA's own description of a GPU, which the benchmark's
    suite writes on one. The number counts JAX devices. Google's names for slices of v4 and v5p
    count cores, two in each device.

    Raises:
        UserError: there are no such devices, or XLA's compiler for them is not installed.
    """
    match = re.fullmatch(r"(.+)-(\d+)", name)
    kind, number = (match[1], int(match[2])) if match else ("", 0)
    if kind in _TPUS and number in _TPUS[kind]:
        return _tpus(kind, _TPUS[kind][number])
    whole = number <= _GPUS_OF_A_MACHINE or number % _GPUS_OF_A_MACHINE == 0
    if kind.endswith(".txtpb") and number and whole:
        return _gpus(_read_target(Path(kind)), number)
    if kind in _GPUS and number and whole:
        return _gpus(_target(_GPUS[kind]), number)
    raise _no_devices(name, kind)


def _no_devices(name: str, kind: str) -> UserError:
    """Returns the error for a name of `find_devices` whose kind, if it has one, is `kind`."""
    known = [*_TPUS, *_GPUS]
    if kind in _TPUS:
        how = f"Use {kind}-N with N of {', '.join(map(str, _TPUS[kind]))}"
    elif kind in _GPUS or kind.endswith(".txtpb"):
        how = f"Use {kind}-N with N of 1 to {_GPUS_OF_A_MACHINE}, or a multiple of it"
    elif kind:
        similar = difflib.get_close_matches(kind.lower(), known, n=1, cutoff=0.7)
        newest = {"v": "v6e", "h": "h200", "a": "a100"}.get(kind[0].lower(), "h100")
        return UserError(
            f"--plan_chips={name}: there is no chip {kind} to plan for",
            f"For example, use --plan_chips={(similar or [newest])[0]}-8; the chips are "
            f"{', '.join(known)}",
        )
    else:
        how = f"Use CHIP-N, such as v5e-8 or h100-8, with one of {', '.join(known)}"
    return UserError(f"--plan_chips={name} names no devices", how)


def _tpus(kind: str, sides: tuple[int, ...]) -> list[jax.Device]:
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",  # there is no server that describes this machine
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing runs, so others may compile too
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    options: dict[str, Any] = {"chip_config_name": "megacore"} if kind == "v4" else {}
    if set(sides) == {1}:
        options["chips_per_host_bounds"] = (1, 1, 1)
    name = f"{kind}:{'x'.join(map(str, sides))}"
    return _describe("tpu", "plan-tpu", topology_name=name, **options)


def _read_target(path: Path) -> str:
    if not path.is_file():
        raise UserError(
            f"--plan_chips names {path}, which is not a file",
            "python -m gpt2.benchmark suite writes one on a GPU",
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        how = "Give the target.txtpb that python -m gpt2.benchmark suite writes on a GPU"
        raise UserError(f"{path} is no text", how) from None


def _gpus(target: str, number: int) -> list[jax.Device]:
    machines = max(1, number // _GPUS_OF_A_MACHINE)
    return _describe(
        "cuda",
        "plan-gpu",
        topology=f"1x{machines}x{number // machines}",
        target_config=target,
    )


def _describe(platform: str, extra: str, **options: Any) -> list[jax.Device]:
    try:
        return list(get_topology_desc(platform=platform, **options).devices)
    except Exception as error:  # of several kinds, by what is missing
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"XLA's compiler for {platform} devices cannot be used here ({reason})",
            f"Install it: pip install -e '.[{extra}]'",
        ) from error


def _target(gpu: _Gpu) -> str:
    """Returns XLA's description of a GPU, as a text of its protocol buffer."""
    major, minor = gpu.capability
    feature = " feature_extension: ACCELERATED_FEATURES" if major == 9 else ""
    shared = gpu.shared_memory << 10
    return f"""
gpu_device_info {{
  name: "{gpu.name}"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: {major} minor: {minor}{feature} }}
  core_count: {gpu.multiprocessors}
  fpus_per_core: 128
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory}
  memory_bandwidth: {gpu.bandwidth}
  l2_cache_size: {gpu.cache}
  shared_memory_per_core: {shared}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared - 1024}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_core_limit: {gpu.threads}
  threads_per_block_limit: 1024
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_address_bits: 64
  pcie_bandwidth: 34359738368
  ecc_enabled: true
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.name}"
"""
