"""Set up a process before its slow imports: memory allocation, XLA flags, compilation cache."""

import contextlib
import ctypes
import glob
import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

from gpt2 import signals

# With these settings, glibc allocates memory in pages of 2 MB. The operating system clears the
# temporary memory of every step page by page, and clears large pages faster. The process retains
# freed blocks of up to 256 MB. If it also retained larger blocks, fragmentation would double its
# memory.
_TUNABLES = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=268435456"
    ":glibc.malloc.trim_threshold=268435456"
)
_STARTED_AGAIN = "GPT2_STARTED_AGAIN"
# This environment variable is set in processes that train alone, even if a launcher such as Slurm
# started their parent as one of several processes.
ALONE = "GPT2_ALONE"
# With these flags, XLA computes matrix products with cuBLAS, and does not merge two of them that
# share an operand.
# All-gathers are combined only up to 6 MB, so that the gathers of a layer's kernels do not wait for
# each other.
_GPU_FLAGS = (
    "--xla_gpu_enable_triton_gemm=false",
    "--xla_gpu_dot_merger_threshold_mb=0",
    "--xla_gpu_all_gather_combine_threshold_bytes=6000000",
)
# With this flag, XLA schedules operations so that they need little memory.
_CPU_FLAG = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
BEGAN = time.perf_counter()  # in seconds, shortly after this process started


def prepare_process() -> None:
    """Set the environment variables in docs/performance.md that the user has not set.

    Call this before JAX is imported, because JAX reads some of them when it is imported. The C
    library reads its settings when a process starts, so a CPU run on Linux restarts itself once,
    unless GLIBC_TUNABLES is set.
    """
    _open_standard_streams()
    signals.begin_process()
    # GLIBC_TUNABLES does not show whether the process was restarted, because a wrapper of Python
    # may remove this variable. The process would then restart itself forever.
    is_second = _STARTED_AGAIN in os.environ
    if is_second:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # Plots are only written to files. MPLBACKEND may name a backend that is not installed here.
    os.environ["MPLBACKEND"] = "agg"
    if "JPY_PARENT_PID" in os.environ:
        # Otherwise a notebook would show each update of a progress bar.
        os.environ.setdefault("TTY_INTERACTIVE", "0")  # rich reads this variable

    tpus = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
    has_tpu = _is_installed("libtpu") and bool(tpus)
    if not has_tpu and not _is_installed("jax_plugins"):
        # Without a TPU, libtpu would print messages that look like failures.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        lacks_tunables = "GLIBC_TUNABLES" not in os.environ and sys.platform == "linux"
        if lacks_tunables and not is_second and "jax" not in sys.modules:
            os.environ["GLIBC_TUNABLES"] = _TUNABLES
            os.environ[_STARTED_AGAIN] = "1"
            # A blocked signal stays pending until the restarted process can handle it.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            os.execv(sys.executable, sys.orig_argv)
        os.environ |= cpu_environment()
    if _is_installed("jax_cuda12_plugin") or _is_installed("jax_cuda13_plugin"):
        os.environ |= _with_flags(*_GPU_FLAGS)

    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    # The user of a container may have no home directory.
    with contextlib.suppress(RuntimeError):
        cache = home.expanduser() / "gpt2-jax" / "xla"
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def _open_standard_streams() -> None:
    """Open /dev/null in place of closed standard streams (stdin, stdout, stderr).

    Some daemons start processes with closed streams. A file of the run could then get the file
    descriptor of such a stream, and messages of libraries would be written into this file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # This returns `number`, the lowest free descriptor.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            stream = open(number, "w" if number else "r")  # noqa: SIM115  it stays open
            setattr(sys, name, stream)


def _is_installed(package: str) -> bool:
    return bool(importlib.util.find_spec(package))


def environment_to_measure() -> dict[str, str]:
    """Return all environment variables for a child process whose speed will be measured.

    They are the variables of this process, the result of `cpu_environment`, and a variable that
    turns JAX's compilation cache off.
    """
    uncached = {"JAX_ENABLE_COMPILATION_CACHE": "0"}
    return os.environ | cpu_environment() | uncached


def cpu_environment() -> dict[str, str]:
    """Return the environment variables to add for child processes that train on CPUs.

    They contain the settings of glibc and XLA that `prepare_process` would apply. GLIBC_TUNABLES is
    left out if this process already has this variable. XLA_FLAGS is left out if this process's
    XLA_FLAGS already contains the necessary flag, or if the installed XLA does not have this flag.
    """
    variables = _with_flags(_CPU_FLAG) if has_old_xla() else {}
    if "GLIBC_TUNABLES" not in os.environ:
        variables["GLIBC_TUNABLES"] = _TUNABLES
    return variables


def release_free_memory() -> None:
    """Make glibc return to the operating system the memory that this process has freed.

    After a compilation, glibc retains hundreds of MB of such memory.
    """
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def has_old_xla() -> bool:
    """Return whether the installed version of XLA is that of JAX 0.10, which has `_CPU_FLAG`.

    Newer versions do not have this flag, and XLA exits if XLA_FLAGS contains an unknown flag.
    """
    # This import is slow, and a process that only restarts itself does not need it.
    from importlib.metadata import version

    return version("jaxlib").startswith("0.10.")


def _with_flags(*wanted: str) -> dict[str, str]:
    """Return {"XLA_FLAGS": FLAGS}: the user's flags, and those in `wanted` that are not among them.

    If the user has set all wanted flags, to any values, return {}.
    """
    given = os.environ.get("XLA_FLAGS", "")
    flags = given
    for flag in wanted:
        name = flag.partition("=")[0]
        if name not in given:
            flags = f"{flags} {flag}".strip()
    return {} if flags == given else {"XLA_FLAGS": flags}
