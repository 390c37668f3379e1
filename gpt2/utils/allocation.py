"""Memory settings of CPU runs, which have to be there when the process starts.

Huge pages: XLA:CPU asks for the temporary memory of a step, gigabytes at 124M, anew each time, and
the kernel hands it out zeroed in pages of 4 KB: over a quarter of a step. In pages of 2 MB that is
next to nothing. glibc asks for these where a variable says so.

Order: by default XLA:CPU orders a program for the most parallelism, and holds values long before
their use. Two cores gain nothing from it; ordered for memory, a step of 124M needs a quarter less.
"""

import ctypes
import importlib.util
import os
import sys
from importlib.metadata import version
from pathlib import Path

_HUGE_PAGES = "glibc.malloc.hugetlb=1"
_ORDER = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"


def cpu_environment() -> dict[str, str]:
    """Returns the variables that a CPU run still lacks, beside what they hold already."""
    environment = {}
    tunables, flags = os.environ.get("GLIBC_TUNABLES", ""), os.environ.get("XLA_FLAGS", "")
    if _kernel_offers_huge_pages() and "glibc.malloc.hugetlb" not in tunables:
        environment["GLIBC_TUNABLES"] = f"{tunables}:{_HUGE_PAGES}".lstrip(":")
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


def _kernel_offers_huge_pages() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.is_file() and "[madvise]" in setting.read_text()  # `always` needs no asking


def _xla_knows_order() -> bool:
    return version("jaxlib").startswith("0.10.")  # an unknown flag would end the process
