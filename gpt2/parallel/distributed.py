"""One run as several processes, on JAX's own distributed runtime.

Every process runs the same command. They meet at the coordinator (process 0), which watches them.
If a process dies, the collective that waits for it fails or aborts. If the collective hangs
instead, the runtime misses the process's heartbeat and aborts.
"""

import contextlib
import faulthandler
import functools
import importlib.util
import os
import re
import socket
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from gpt2.errors import UserError, describe_exit, exit_process, log
from gpt2.utils.cluster import ALONE

P = ParamSpec("P")
R = TypeVar("R")

# How long a process may be silent before it counts as dead.
HEARTBEAT_SECONDS = 20

# In the messages of collectives and of the runtime where a process is gone.
_LOST_PEER = re.compile(
    "Gloo|NCCL|closed by peer|UNAVAILABLE|heartbeat|CoordinationService", re.I
)


def initialize(
    coordinator: str | None, num_processes: int | None, process_index: int | None
) -> None:
    """Joins the run's other processes, before JAX has devices.

    Without `coordinator`, HOST:PORT of process 0, Slurm, Open MPI or a TPU pod tells of them.
    """
    lacks = {each is None for each in (coordinator, num_processes, process_index)}
    if len(lacks) > 1:
        raise UserError("--coordinator, --num_processes, --process_index go together")
    # Which would hide devices.
    place = "deactivate" if coordinator else _find_launcher()
    if not place:
        return
    # The runtime crashes where the port is taken.
    if coordinator and process_index == 0:
        _, _, port = coordinator.rpartition(":")
        socket.create_server(("", int(port))).close()
    # The runtime waits for the others silently, and ends the process if they do not come.
    log("waiting for the other processes")
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_index,
        cluster_detection_method=place,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=3600,  # in which process 0 sends a run's last files to a bucket
    )
    # If another process is gone, the runtime says so and aborts. Stacks would bury its words.
    faulthandler.disable()


@contextlib.contextmanager
def ends_together() -> Iterator[None]:
    """Ends this process at once if the body fails, where there are several processes.

    Otherwise it would wait for the others to shut down or to finish a checkpoint, while they wait
    for it to join a collective.
    """
    try:
        yield
    except BaseException as error:
        if not jax.distributed.is_initialized():
            raise
        told = "".join(traceback.format_exception(error))
        if isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)):
            told = "error: another process of this run has ended; the same commands continue"
        message, code = describe_exit(error) or (told, 1)
        exit_process(message, code)


def _find_launcher() -> str | None:
    """Returns JAX's name for what has started this process, maybe as one of several."""
    given = os.environ
    if ALONE in given:
        return None
    numbers = "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "MEGASCALE_NUM_SLICES"
    several = {name for name in numbers if int(given.get(name, 1)) > 1}
    if "OMPI_COMM_WORLD_SIZE" in several:
        if "OMPI_MCA_orte_hnp_uri" in given:
            return "ompi"
        if importlib.util.find_spec("mpi4py") is None:  # of which version 5 needs it
            raise UserError(
                "processes of mpirun need the package mpi4py",
                "Run `pip install mpi4py`",
            )
        return "mpi4py"
    if "SLURM_NTASKS" in several and "SLURM_STEP_NODELIST" in given:
        return "slurm"
    chips = Path("/dev/accel0").exists() or Path("/dev/vfio/0").exists()
    if not chips or importlib.util.find_spec("libtpu") is None:
        return None
    # Kubernetes names the hosts, Kaggle its only one. Elsewhere Google's server tells, if asked.
    hosts = given.get("TPU_PROCESS_ADDRESSES") or given.get("TPU_WORKER_HOSTNAMES")
    if hosts:
        return "gketpu" if "," in hosts or "MEGASCALE_NUM_SLICES" in several else None
    if "TPU_SKIP_MDS_QUERY" in given:
        return None
    return "gcetpu"


def only_first(function: Callable[P, R]) -> Callable[P, R | None]:
    """Returns a function that runs in the first process; in the others it returns None at once."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        if jax.process_index() == 0:
            return function(*args, **kwargs)
        return None

    return guarded


def from_first(number: int) -> int:
    """Returns process 0's `number` in every process, whatever the others read from their disks."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def from_all(text: str) -> list[str]:
    """Returns the text of each process, in ASCII, in every process."""
    data = text.encode()
    sizes = multihost_utils.process_allgather(np.int32(len(data)))
    rows = multihost_utils.process_allgather(
        np.frombuffer(data.ljust(max(sizes)), np.uint8)
    )
    return [row.tobytes().decode().rstrip() for row in rows]
