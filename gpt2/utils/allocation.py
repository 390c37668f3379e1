"""Memory settings of CPU runs, which have to be there when the process starts.

Huge pages: XLA:CPU asks for the temporary memory of a step, gigabytes at 124M, anew each time, and
the kernel hands it out zeroed in pages of 4 KB: over a quarter of a step. In pages of 2 MB that is
next to nothing. glibc asks for these where a variable says so.

Order: by default XLA:CPU orders a program for the most parallelism, and holds values long before
their use. Two cores gain nothing from it; ordered for memory, a step of 124M needs a quarter less.
"""

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
    """Starts this program again, once, with the variables that it lacks, and says so.

    To be called before anything is under way: whatever the process holds is lost.
    """
    environment = cpu_environment()
    if environment:
        settings = " ".join(f"{name}='{value}'" for name, value in environment.items())
        print(f"Restarting with {settings}", file=sys.stderr, flush=True)
        os.execve(sys.executable, sys.orig_argv, os.environ | environment)


def _kernel_offers_huge_pages() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.is_file() and "[madvise]" in setting.read_text()  # `always` needs no asking


def _xla_knows_order() -> bool:
    return version("jaxlib").startswith("0.10.")  # an unknown flag would end the process
