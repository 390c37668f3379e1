"""Prepares a process before its slow imports: memory, flags of XLA, a cache of its programs."""

import ctypes
import glob
import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

from gpt2 import signals

# glibc requests pages of 2 MB, since the kernel clears the temporary memory of every step page by
# page, and keeps freed blocks of up to 256 MB: fragments of larger ones would take as much again.
_TUNABLES = {"hugetlb": 1, "mmap_threshold": 2**28, "trim_threshold": 2**28}
_STARTED_AGAIN = "GPT2_STARTED_AGAIN"
# Products go to cuBLAS, those that share an operand stay apart, and gathers of a layer's kernels do
# not wait for each other.
_GPU_FLAGS = (
    "--xla_gpu_enable_triton_gemm=false",
    "--xla_gpu_dot_merger_threshold_mb=0",
    "--xla_gpu_all_gather_combine_threshold_bytes=6000000",
)
# For little memory.
_CPU_FLAG = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
_chosen: set[str] = set()  # variables of JAX's cache that this process set
_imported = time.monotonic()


def prepare_process() -> None:
    """Makes the settings of docs/performance.md, but none that a user has made. Call it first.

    The C library reads its own when a process starts: a CPU run starts itself again, once.
    """
    signals.begin_process()
    is_second = _STARTED_AGAIN in os.environ  # even where the settings got lost
    if is_second:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if "JPY_PARENT_PID" in os.environ:  # a notebook would keep every drawing of a bar
        os.environ.setdefault("TTY_INTERACTIVE", "0")  # as rich calls it

    has_plugins = _is_installed("jax_plugins")
    has_libtpu = _is_installed("libtpu")
    tpus = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
    is_alone = has_libtpu and not has_plugins
    if is_alone and not tpus:  # it prints what looks like failures
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    platform = os.environ.get("JAX_PLATFORMS")
    if not platform and not has_plugins and not has_libtpu:
        platform = "cpu"
    if platform == "cpu":
        tunables = _lacking_tunables()
        os.environ |= tunables
        if tunables and not is_second and "jax" not in sys.modules:
            os.environ[_STARTED_AGAIN] = "1"
            # It waits for the next start.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            os.execv(sys.executable, sys.orig_argv)
        os.environ |= cpu_environment()
    if _is_installed("jax_cuda12_plugin") or _is_installed("jax_cuda13_plugin"):
        os.environ |= _with_flags(*_GPU_FLAGS)

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        wanted = {
            "JAX_COMPILATION_CACHE_DIR": str(cache / "gpt2-jax" / "xla"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        _chosen.update(wanted.keys() - os.environ.keys())
        os.environ |= {name: wanted[name] for name in _chosen}


def _is_installed(package: str) -> bool:
    return bool(importlib.util.find_spec(package))


def seconds_since_start() -> float:
    """Returns how old this process is. Where it started itself again, both starts count."""
    try:
        stat = Path("/proc/self/stat").read_text()
        _, _, after_name = stat.rpartition(")")
        began = int(after_name.split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, AttributeError):  # not Linux
        return time.monotonic() - _imported


def environment_to_measure() -> dict[str, str]:
    """Returns the variables of a process that is timed: a CPU run's, without our cache."""
    variables = dict(os.environ)
    for name in _chosen:
        variables.pop(name, None)
    return variables | cpu_environment()


def cpu_environment() -> dict[str, str]:
    """Returns the variables of a CPU run that this process lacks, for processes that it starts."""
    tunables = _lacking_tunables()
    return tunables | _with_flags(_CPU_FLAG) if has_old_xla() else tunables


def _lacking_tunables() -> dict[str, str]:
    """Returns the variable of the C library that this process lacks, if it lacks any of it."""
    given = os.environ.get("GLIBC_TUNABLES", "")
    wanted = [given] if given else []
    for name, value in _TUNABLES.items():
        if name not in given:
            wanted.append(f"glibc.malloc.{name}={value}")
    joined = ":".join(wanted)
    if joined == given or sys.platform != "linux":
        return {}
    return {"GLIBC_TUNABLES": joined}


def release_free_memory() -> None:
    """Returns freed memory to the kernel: glibc keeps hundreds of megabytes after compilation."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def has_old_xla() -> bool:
    """Returns whether XLA is that of JAX 0.10. A flag that a newer one lacks ends the process."""
    # Slow, and the first of two starts needs none.
    from importlib.metadata import version

    return version("jaxlib").startswith("0.10.")


def _with_flags(*wanted: str) -> dict[str, str]:
    """Returns XLA_FLAGS with those that they lack, if they lack any."""
    given = os.environ.get("XLA_FLAGS", "")
    flags = given
    for flag in wanted:
        name = flag.partition("=")[0]
        if name not in given:
            flags = f"{flags} {flag}".strip()
    return {} if flags == given else {"XLA_FLAGS": flags}
