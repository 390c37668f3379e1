"""Memory settings of CPU runs, which have to be there when the process starts.

Huge pages: XLA:CPU asks for the temporary memory of a step, gigabytes at 124M, anew each time, and
the kernel hands it out zeroed in pages of 4 KB: over a quarter of a step. In pages of 2 MB that is
next to nothing. glibc asks for these where a variable says so.

Kept memory: what is left of that cost is still a tenth of a small model's step, so blocks of up to
256 MB, and as much at the end of an arena, stay with the process when they are freed (64 MB where
a thread has an arena of its own). Larger ones go back, or fragmentation would hold twice what 124M
needs.

Order: by default XLA:CPU orders a program for the most parallelism, and holds values long before
their use. Two cores gain nothing from it; ordered for memory, a step of 124M needs a quarter less.
"""

import ctypes
import importlib.util
import os
import platform
import sys
from importlib.metadata import version

_KEPT = 2**28  # bytes
_TUNABLES = {
    "glibc.malloc.hugetlb": 1,
    "glibc.malloc.mmap_threshold": _KEPT,
    "glibc.malloc.trim_threshold": _KEPT,
}
_ORDER = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"


def cpu_environment() -> dict[str, str]:
    """Returns the variables that a CPU run still lacks, beside what they hold already."""
    environment = {}
    tunables, flags = os.environ.get("GLIBC_TUNABLES", ""), os.environ.get("XLA_FLAGS", "")
    lacking = [f"{name}={value}" for name, value in _TUNABLES.items() if name not in tunables]
    if _has_glibc() and lacking:
        environment["GLIBC_TUNABLES"] = ":".join([tunables, *lacking]).lstrip(":")
    if _xla_knows_order() and "xla_cpu_scheduler_type" not in flags:
        environment["XLA_FLAGS"] = f"{flags} {_ORDER}".lstrip()
    return environment


def restart_for_cpu() -> None:
    """Sets what a CPU run lacks. If the C library has to see it, starts this program again, once.

    Does nothing where JAX may have more than CPUs. To be called before JAX has devices, which is
    when XLA reads its variable, and before anything is under way: what the process holds is lost.
    """
    environment = {} if _may_have_accelerators() else cpu_environment()
    os.environ |= environment
    if "GLIBC_TUNABLES" in environment:
        print(f"restarting with GLIBC_TUNABLES={environment['GLIBC_TUNABLES']}", flush=True)
        os.execv(sys.executable, sys.orig_argv)


def release_free_memory() -> None:
    """Gives memory back that compilation used: hundreds of megabytes, which glibc would keep."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _may_have_accelerators() -> bool:
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms != "cpu"
    return any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))


def _has_glibc() -> bool:
    """Whether the C library knows the tunables, and takes thresholds of more than 32 MB."""
    name, release = platform.libc_ver()
    return name == "glibc" and tuple(map(int, release.split(".")[:2])) >= (2, 35)


def _xla_knows_order() -> bool:
    return version("jaxlib").startswith("0.10.")  # an unknown flag would end the process
