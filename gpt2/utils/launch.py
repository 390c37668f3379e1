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
_TUNABLES = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=268435456"
    ":glibc.malloc.trim_threshold=268435456"
)
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
BEGAN = time.perf_counter()  # seconds, of this process but for what started it


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

    tpus = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
    has_tpu = _is_installed("libtpu") and bool(tpus)
    if not has_tpu and not _is_installed("jax_plugins"):
        # Without a TPU, libtpu prints what looks like failures.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        lacks_tunables = "GLIBC_TUNABLES" not in os.environ and sys.platform == "linux"
        if lacks_tunables and not is_second and "jax" not in sys.modules:
            os.environ["GLIBC_TUNABLES"] = _TUNABLES
            os.environ[_STARTED_AGAIN] = "1"
            # It waits for the next start.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            os.execv(sys.executable, sys.orig_argv)
        os.environ |= cpu_environment()
    if _is_installed("jax_cuda12_plugin") or _is_installed("jax_cuda13_plugin"):
        os.environ |= _with_flags(*_GPU_FLAGS)

    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(home) / "gpt2-jax" / "xla"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def _is_installed(package: str) -> bool:
    return bool(importlib.util.find_spec(package))


def environment_to_measure() -> dict[str, str]:
    """Returns the variables of a process that is timed: a CPU run's, without a cache."""
    uncached = {"JAX_ENABLE_COMPILATION_CACHE": "0"}
    return os.environ | cpu_environment() | uncached


def cpu_environment() -> dict[str, str]:
    """Returns the variables of a CPU run that this process lacks, for processes that it starts."""
    variables = _with_flags(_CPU_FLAG) if has_old_xla() else {}
    if "GLIBC_TUNABLES" not in os.environ:
        variables["GLIBC_TUNABLES"] = _TUNABLES
    return variables


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
