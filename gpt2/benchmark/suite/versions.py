"""What a machine has: its devices, its versions, and XLA's description of its GPU.

    python -m gpt2.benchmark.suite.versions DIR

prints JSON. On a GPU it writes DIR/target.txtpb, for `train.py --plan_chips=DIR/target.txtpb-8`.
Without DIR it tells the devices alone.
"""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
from jaxlib import xla_client

from gpt2.utils.files import write_text
from gpt2.utils.platform import platform_of

_PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint", "grain", "torch"),
    *("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
    *("nvidia-cublas-cu12", "nvidia-cublas"),
)
_ASKED = (
    "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.mem,ecc.mode.current"
)
_VARIABLES = ("XLA_FLAGS", "XLA_CLIENT_MEM_FRACTION", "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")


def describe_device() -> dict[str, str]:
    """Returns the platform, and the number and the kind of the devices."""
    devices = jax.devices()
    kind = f"{len(devices)} x {devices[0].device_kind}"
    return {"platform": platform_of(devices[0]), "device": kind}


def describe_machine(output: Path) -> dict[str, Any]:
    """Returns versions and devices, and writes target.txtpb into `output` on a GPU."""
    device = jax.devices()[0]
    return {
        **describe_device(),
        "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        "runtime": device.client.platform_version,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu_cores": os.cpu_count(),
        "versions": _versions(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "nvidia-smi": _ask_driver(),
        "target": _keep_target(device, output),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _ask_driver() -> str:
    command = ["nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        return "not on this device"
    except subprocess.TimeoutExpired:
        return "failed: no answer within 20 s"
    return run.stdout.strip() if run.returncode == 0 else f"failed: {run.stderr.strip()}"


def _keep_target(device: jax.Device, output: Path) -> str:
    """Writes XLA's description of the GPU, and returns the file's name or why there is none.

    XLA's client for GPUs gives its topology an attribute of this name, as text.
    """
    if platform_of(device) != "gpu":
        return "not on this device"
    try:
        text = xla_client.get_topology_for_devices([device]).target_config
    except (AttributeError, RuntimeError) as error:
        return f"failed: {error}"
    path = output / "target.txtpb"
    write_text(path, text)
    return path.name


if __name__ == "__main__":
    asked = [Path(argument) for argument in sys.argv[1:]]
    print(json.dumps(describe_machine(*asked) if asked else describe_device(), indent=2))
