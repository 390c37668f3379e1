"""Find devices of other machines to compile for: TPU slices, and machines with NVIDIA GPUs.

XLA compiles for these devices on any x86 machine with Linux, if libtpu or JAX's plugin for CUDA is
installed. Nothing runs on the devices.
"""

import importlib.util
import os
from pathlib import Path

import jax
from jax.experimental.topologies import get_topology_desc

from gpt2.errors import UserError

_TPUS = {"v4": 3, "v5p": 3, "v5e": 2, "v6e": 2}  # number of dimensions of the torus
_GPUS_OF_A_MACHINE = 8
# The modules of which one contains the compiler for a platform.
_COMPILERS = {
    "tpu": ["libtpu"],
    "cuda": ["jax_cuda12_plugin", "jax_cuda13_plugin"],
}
# XLA's descriptions of GPUs, each in a file with the name of the chip.
_GPUS = Path(__file__).parents[3] / "configs" / "chips"


def find_devices(name: str) -> list[jax.Device]:
    """Return the JAX devices that `name` describes: a chip and a number of devices, as in `v5e-16`.

    Instead of a chip, `name` may contain the path of a file with XLA's description of a GPU. The
    suite of `gpt2.lab.benchmark` writes such files. Google's names for slices of v4 and v5p contain
    the number of cores instead of devices. A device has two cores, so Google's v4-16 is v4-8 here.
    """
    kind, _, digits = name.rpartition("-")
    number = int(digits) if digits.isdecimal() else 0
    if number > _GPUS_OF_A_MACHINE and number % _GPUS_OF_A_MACHINE:
        # Refuse this number: if there are several machines, each takes part with all its 8 GPUs.
        # The condition refuses no TPU slice, because the sizes of slices are powers of two.
        number = 0
    known = {file.stem: file for file in sorted(_GPUS.glob("*.txtpb"))}
    file = known.get(kind, Path(kind))
    if kind in _TPUS:
        if number.bit_count() == 1:
            return _tpus(kind, number)
    elif number and file.is_file():
        target = file.read_text(encoding="utf-8")
        machines = max(1, number // _GPUS_OF_A_MACHINE)
        topology = f"1x{machines}x{number // machines}"
        return _describe("cuda", "", topology=topology, target_config=target)
    raise UserError(
        f"--chips={name} does not name devices that exist",
        "Give CHIP-N for N devices, such as v5e-8 or h100-8. For TPUs, N is a power of two. "
        "For GPUs, N is at most 8 or a multiple of 8. "
        f"The chips are {', '.join([*_TPUS, *known])}",
    )


def _tpus(kind: str, number: int) -> list[jax.Device]:
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",  # this machine has no metadata server
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # harmless, because nothing runs on TPUs
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    # The sides of the torus are powers of two, and as equal as possible.
    dimensions = _TPUS[kind]
    bits = number.bit_length() - 1
    sides = [2 ** ((bits + i) // dimensions) for i in range(dimensions)]
    if sides == [1, 2, 2]:  # one host has 2x2x1 chips
        sides = [2, 2, 1]
    options: dict[str, object] = {}
    if kind == "v4":
        options["chip_config_name"] = "megacore"
    if number == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    topology = f"{kind}:{'x'.join(map(str, sides))}"
    return _describe("tpu", topology, **options)


def _describe(platform: str, name: str, **options: object) -> list[jax.Device]:
    try:
        return list(get_topology_desc(name, platform, **options).devices)
    except Exception as error:  # its type depends on what is missing
        reason = str(error).strip().partition("\n")[0]
        extra = "plan-tpu" if platform == "tpu" else "plan-gpu"
        what = f"The compiler for the {platform} devices of --chips does not start ({reason})"
        remedy = (
            "Give another number of chips, or use --devices, which needs no compiler"
        )
        if not any(map(importlib.util.find_spec, _COMPILERS[platform])):
            remedy = f"Run `pip install -e '.[{extra}]'`, or use --devices, which needs no compiler"
        raise UserError(what, remedy) from error
