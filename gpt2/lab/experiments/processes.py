"""Run several programs at the same time on this machine, each in its own process."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence, Set
from pathlib import Path
from typing import NamedTuple


class Slot(NamedTuple):
    """The CPUs and environment variables that one run at a time uses."""

    cores: Set[int]
    environment: dict[str, str]


def start(command: Sequence[str], log: Path, slot: Slot) -> subprocess.Popen:
    """Start a Python file that appends to `log`, and gets SIGTERM when this process ends."""
    # Imported here, because a child that becomes another file must not import JAX before.
    from gpt2.parallel.distributed import ALONE

    cores = ",".join(map(str, slot.cores))
    with open(log, "ab") as file:
        return subprocess.Popen(
            # -P: this file must not import its neighbours. It then becomes the other file.
            [sys.executable, "-P", __file__, cores, *command],
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | {ALONE: "1"} | slot.environment,
            start_new_session=True,  # Ctrl-C reaches this process alone, which stops its runs
        )


def become(cores: str, *command: str) -> None:
    """Turn this process into a Python file that runs on some cores, and ends with its parent."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, map(int, cores.split(",")))
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    become(*sys.argv[1:])
