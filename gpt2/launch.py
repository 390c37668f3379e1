"""Prepares a process before its slow imports: memory, flags of XLA, a cache of its programs.

Every command calls `prepare_process` first. docs/performance.md, Settings, says what each setting
saves.

Huge pages: glibc requests pages of 2 MB, since the kernel clears the temporary memory of every
step page by page (docs/performance.md, XLA:CPU note 13).

Kept memory: freed blocks of up to 256 MB stay with the process. Larger blocks go back to the
kernel, since fragmentation would otherwise hold twice what a step of 124M needs.

Order: XLA orders programs for little memory (docs/performance.md, XLA:CPU note 12).

On NVIDIA GPUs, products go to cuBLAS, those that share an operand stay apart, and gathers of a
layer's kernels do not wait for each other (docs/performance.md, GPUs and TPUs).
"""

import ctypes
import glob
import importlib.util
import os
import platform
import re
import signal
import sys
import time
from pathlib import Path

from gpt2 import interrupts

_KEPT = 2**28  # bytes
_TUNABLES = {
    "glibc.malloc.hugetlb": 1,
    "glibc.malloc.mmap_threshold": _KEPT,
    "glibc.malloc.trim_threshold": _KEPT,
}
_STARTED_AGAIN = "GPT2_STARTED_AGAIN"  # for the second start: names of `_chosen`
_CACHE, _LEAST_SECONDS = (
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
)
_chosen: dict[str, str] = {}  # variables of JAX that this process set
_set_flags: list[str] = []  # of XLA for GPUs, by this process
_GPU_FLAGS = (
    "--xla_gpu_enable_triton_gemm=false",
    "--xla_gpu_dot_merger_threshold_mb=0",
    "--xla_gpu_all_gather_combine_threshold_bytes=6000000",
)
_TPU_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*")  # of TPUs
_PCI_VENDORS = "/sys/bus/pci/devices/*/vendor"
_GOOGLE = "0x1ae0"  # the vendor of TPUs, as JAX looks for them
_imported = time.monotonic()
_ORDER = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"


def prepare_process() -> None:
    """Makes the memory settings of a CPU run, and gives JAX a directory for compiled programs.

    The C library reads its settings when a process starts. If they are missing, the program starts
    itself again, once, unless it has imported JAX already. The restart loses what the process
    holds: call this before anything else, slow imports included. Where JAX may find an
    accelerator, there are no memory settings to make.

    libtpu, which plans for TPUs on any machine, is not asked for TPUs where there are none. It
    would print lines that look like failures.

    From here on, Ctrl-C ends the process with a line (gpt2/interrupts.py).
    """
    interrupts.begin()
    if _STARTED_AGAIN in os.environ:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        earlier = set(os.environ[_STARTED_AGAIN].split()) & set(os.environ)
        _chosen.update({name: os.environ[name] for name in earlier})
    if "JAX_PLATFORMS" not in os.environ and _has_libtpu_alone():
        _chosen["JAX_PLATFORMS"] = os.environ["JAX_PLATFORMS"] = "cpu"
    if not _may_have_accelerators():
        missing = _missing_tunables()
        once = _STARTED_AGAIN not in os.environ  # even where the settings get lost
        if missing and once and "jax" not in sys.modules:
            os.environ |= missing | {_STARTED_AGAIN: " ".join(_chosen)}
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # waits for the next start
            os.execv(sys.executable, sys.orig_argv)
        os.environ |= _missing_order()
    if any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))):
        flags = os.environ.get("XLA_FLAGS", "")
        given = {flag.partition("=")[0] for flag in flags.split()}
        # What a user sets wins.
        _set_flags[:] = [flag for flag in _GPU_FLAGS if flag.partition("=")[0] not in given]
        os.environ["XLA_FLAGS"] = " ".join([flags, *_set_flags]).strip()
    if _CACHE not in os.environ:
        place = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        chosen = {_CACHE: str(place / "gpt2-jax" / "xla"), _LEAST_SECONDS: "0.5"}
        _chosen.update({name: chosen[name] for name in chosen if name not in os.environ})
        os.environ |= _chosen


def seconds_since_start() -> float:
    """Returns how old this process is. Where it started itself again, both starts count."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux
        return time.monotonic() - _imported


def environment_to_measure() -> dict[str, str]:
    """Returns the variables of a process that is timed: a CPU run's, without this one's choices."""
    ours = {_STARTED_AGAIN} | {_CACHE, _LEAST_SECONDS} & _chosen.keys()
    rest = {name: value for name, value in os.environ.items() if name not in ours}
    return rest | cpu_environment()


def cpu_environment() -> dict[str, str]:
    """Returns the variables of a CPU run that this process lacks, for processes that it starts."""
    return _missing_tunables() | _missing_order()


def describe_settings() -> str:
    """Returns the settings that `prepare_process` made, as text; empty if there are none."""
    settings = []
    if platforms := _chosen.get("JAX_PLATFORMS"):
        settings.append(f"JAX_PLATFORMS={platforms}, since there is libtpu and no TPU")
    if _set_flags and _may_have_accelerators():
        settings.append(f"XLA_FLAGS={' '.join(_set_flags)}")
    elif _STARTED_AGAIN in os.environ:
        settings.append(
            "huge pages, freed blocks kept (the program started itself again with GLIBC_TUNABLES)"
        )
    return "; ".join(settings)


def release_free_memory() -> None:
    """Returns freed memory to the kernel: glibc keeps hundreds of megabytes after compilation."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _may_have_accelerators() -> bool:
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms != "cpu"
    return any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))


def _has_libtpu_alone() -> bool:
    """Whether libtpu is the only plugin of JAX here, and no TPU is.

    libtpu reaches a TPU through the device files below. Google's machines and runtimes that have
    one also set variables.
    """
    if importlib.util.find_spec("jax_plugins") or not importlib.util.find_spec("libtpu"):
        return False
    # JAX sets the one that is left out where it finds no TPU.
    told = {name for name in os.environ if re.match("(CLOUD_|JAX_FORCE_|LIB)?TPU", name)}
    if told - {"TPU_SKIP_MDS_QUERY"} or any(map(glob.glob, _TPU_FILES)):
        return False
    try:
        vendors = {Path(path).read_text().strip() for path in glob.glob(_PCI_VENDORS)}
    except OSError:  # not to be read, or gone meanwhile
        return False
    return _GOOGLE not in vendors


def _missing_tunables() -> dict[str, str]:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    missing = [f"{name}={value}" for name, value in _TUNABLES.items() if name not in tunables]
    if not (_has_glibc() and missing):
        return {}
    return {"GLIBC_TUNABLES": ":".join([tunables, *missing]).lstrip(":")}


def _missing_order() -> dict[str, str]:
    flags = os.environ.get("XLA_FLAGS", "")
    if not has_old_xla() or "xla_cpu_scheduler_type" in flags:
        return {}
    return {"XLA_FLAGS": f"{flags} {_ORDER}".lstrip()}


def _has_glibc() -> bool:
    """Whether the C library knows the tunables, and takes thresholds of more than 32 MB."""
    name, release = platform.libc_ver()
    return name == "glibc" and tuple(map(int, release.split(".")[:2])) >= (2, 35)


def has_old_xla() -> bool:
    """Returns whether XLA is that of JAX 0.10, whose flags newer ones do not know.

    An unknown flag in XLA_FLAGS ends the process.
    """
    from importlib.metadata import version  # slow: not before Ctrl-C is a line

    return version("jaxlib").startswith("0.10.")
