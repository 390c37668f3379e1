"""Huge pages for the memory of CPU runs.

XLA:CPU asks for the temporary memory of a step, gigabytes at 124M, anew each time, and the kernel
hands it out zeroed in pages of 4 KB: over a quarter of a step. In pages of 2 MB that is next to
nothing. glibc asks for these where a variable says so when the process starts.
"""

import os
import sys
from pathlib import Path

_TUNABLES = "GLIBC_TUNABLES"
_SETTING = "glibc.malloc.hugetlb=1"


def huge_page_environment() -> dict[str, str]:
    """Returns the variables that make a new process use huge pages, none if it does already."""
    present = os.environ.get(_TUNABLES, "")
    if "glibc.malloc.hugetlb" in present or not _kernel_offers_them():
        return {}
    return {_TUNABLES: f"{present}:{_SETTING}".lstrip(":")}


def restart_with_huge_pages() -> None:
    """Starts this program again, once, with huge pages, and says so; if they are not on already.

    For CPU runs, before anything is under way: whatever the process holds is lost.
    """
    environment = huge_page_environment()
    if environment:
        print(f"Restarting with {_TUNABLES}={environment[_TUNABLES]}", file=sys.stderr, flush=True)
        os.execve(sys.executable, sys.orig_argv, os.environ | environment)


def _kernel_offers_them() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.is_file() and "[madvise]" in setting.read_text()  # `always` needs no asking
