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
_STARTED_AGAIN = "GPT2_STARTED_AGAIN"  # set for the second start
_ORDER = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"


def cpu_environment() -> dict[str, str]:
    """Returns the variables that a CPU run still lacks, beside what they hold already."""
    return _lacking_tunables() | _lacking_order()


def restart_for_cpu() -> None:
    """Starts this program again, once, with what the C library has to see of a CPU run's settings.

    Does nothing where JAX may have more than CPUs. To be called before anything else, slow imports
    included: what the process holds is lost. `describe_settings` lets the new one say so.
    """
    environment = {} if _may_have_accelerators() else _lacking_tunables()
    if environment and _STARTED_AGAIN not in os.environ:  # not for ever where they get lost
        os.environ |= environment | {_STARTED_AGAIN: "1"}
        os.execv(sys.executable, sys.orig_argv)


def describe_settings() -> str:
    """Returns, for a run's first screen, what this program was started again for, or nothing."""
    if _STARTED_AGAIN not in os.environ:
        return ""
    return "huge pages, freed blocks kept (the program started itself again with GLIBC_TUNABLES)"


def order_for_cpu() -> None:
    """Lets XLA:CPU order programs for memory, where JAX has no more than CPUs.

    To be called before it looks for devices, when XLA reads its variable.
    """
    os.environ |= {} if _may_have_accelerators() else _lacking_order()


def release_free_memory() -> None:
    """Gives memory back that compilation used: hundreds of megabytes, which glibc would keep."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _may_have_accelerators() -> bool:
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms != "cpu"
    return any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))


def _lacking_tunables() -> dict[str, str]:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    lacking = [f"{name}={value}" for name, value in _TUNABLES.items() if name not in tunables]
    if not (_has_glibc() and lacking):
        return {}
    return {"GLIBC_TUNABLES": ":".join([tunables, *lacking]).lstrip(":")}


def _lacking_order() -> dict[str, str]:
    flags = os.environ.get("XLA_FLAGS", "")
    if not _xla_knows_order() or "xla_cpu_scheduler_type" in flags:
        return {}
    return {"XLA_FLAGS": f"{flags} {_ORDER}".lstrip()}


def _has_glibc() -> bool:
    """Whether the C library knows the tunables, and takes thresholds of more than 32 MB."""
    name, release = platform.libc_ver()
    return name == "glibc" and tuple(map(int, release.split(".")[:2])) >= (2, 35)


def _xla_knows_order() -> bool:
    return version("jaxlib").startswith("0.10.")  # an unknown flag would end the process
