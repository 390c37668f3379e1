"""Calls on this machine or on a Ray cluster, whose workers import no JAX for it, and processes."""

import contextlib
import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from gpt2.errors import UserError

ALONE = "GPT2_ALONE"  # a variable of processes that are no part of what a launcher has begun


class Slot(NamedTuple):
    """What one run at a time has for itself: CPUs, and variables of the environment."""

    cores: Set[int]
    environment: dict[str, str]


def connect(cluster: str) -> ModuleType | None:
    """Joins the cluster that ray[:ADDRESS] names, or $RAY_ADDRESS; returns the package, or None."""
    if not cluster:
        return None
    kind, _, address = cluster.partition(":")
    if kind != "ray":
        raise UserError(f"--cluster={cluster} is not ray[:ADDRESS]")
    try:
        import ray

        host, _, port = address.rpartition(":")
        if port:  # where nobody answers, Ray would try for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address or "auto")
    except (ImportError, OSError, ValueError) as error:
        what = f"no Ray cluster is reached ({error})"
        raise UserError(what, "See docs/cluster.md") from None
    return ray


@contextlib.contextmanager
def open_pool(ray: ModuleType | None) -> Iterator[tuple[int, Callable[..., Future]]]:
    """Yields how many calls run at once, and the `submit` of an executor: of Ray, or of threads.

    Ray repeats what a lost node had. Threads suffice where calls release the interpreter lock.
    """
    if not ray:
        number = os.cpu_count() or 1
        interval = sys.getswitchinterval()
        # Seconds for which they wait for the lock, less than 5e-3.
        sys.setswitchinterval(2e-4)
        with ThreadPoolExecutor(number) as pool:
            yield number, pool.submit
        sys.setswitchinterval(interval)  # a run may follow
        return
    task = functools.cache(ray.remote(max_retries=-1))
    number = int(ray.cluster_resources().get("CPU", 1))
    yield (
        number,
        lambda function, *arguments: task(function).remote(*arguments).future(),
    )


def start(command: Sequence[str], log: Path, slot: Slot) -> subprocess.Popen:
    """Starts a Python file, which appends to `log`, and gets SIGTERM when we end."""

    def prepare() -> None:
        if sys.platform == "linux":
            os.sched_setaffinity(0, slot.cores)
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG

    with open(log, "ab") as file:
        return subprocess.Popen(
            [sys.executable, *command],
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | {ALONE: "1"} | slot.environment,
            start_new_session=True,  # Ctrl-C comes to this process, which tells its runs
            preexec_fn=prepare,
        )
