"""Runs at once on this machine, in processes of their own."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence, Set
from pathlib import Path
from typing import NamedTuple

ALONE = "GPT2_ALONE"  # a variable of processes that are no part of what a launcher has begun


class Slot(NamedTuple):
    """What one run at a time has for itself: CPUs, and variables of the environment."""

    cores: Set[int]
    environment: dict[str, str]


def start(command: Sequence[str], log: Path, slot: Slot) -> subprocess.Popen:
    """Starts a Python file, which appends to `log` and gets SIGTERM when we end."""
    cores = ",".join(map(str, slot.cores))
    with open(log, "ab") as file:
        return subprocess.Popen(
            # This file, apart from the modules beside it, becomes the other one.
            [sys.executable, "-P", __file__, cores, *command],
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | {ALONE: "1"} | slot.environment,
            start_new_session=True,  # Ctrl-C comes to this process, which tells its runs
        )


def become(cores: str, *command: str) -> None:
    """Lets this process run a Python file on some cores, and end with the process before it."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, map(int, cores.split(",")))
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    become(*sys.argv[1:])
