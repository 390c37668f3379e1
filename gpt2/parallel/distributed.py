"""A run of several processes, on JAX's distributed runtime.

Every process runs the same command. The processes connect to the coordinator (process 0), which
monitors their heartbeats. If a process dies, the collectives that wait for it fail or abort. If a
collective hangs instead, the runtime detects the missing heartbeat and aborts all processes.
"""

import contextlib
import faulthandler
import functools
import importlib.util
import itertools
import json
import os
import re
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ParamSpec, TypeVar

import jax
from jax._src.distributed import global_state  # its key-value store has no public name

from gpt2.errors import UserError, describe_exit, exit_process, log
from gpt2.utils.launch import ALONE

P = ParamSpec("P")
R = TypeVar("R")

# Seconds without a heartbeat after which the runtime considers a process dead.
HEARTBEAT_SECONDS = 20

# Milliseconds for which `from_all` waits for the strings of the other processes, which may first
# prepare data for hours. If one of them dies, its missing heartbeat ends the wait.
_DAY = 86_400_000
_exchanges = itertools.count()  # numbers the calls of `from_all`

# Matches the error messages of collectives and of the runtime if another process has ended. It also
# matches other errors of Gloo and NCCL, which usually have the same cause.
_LOST_PEER = re.compile(
    "Gloo|NCCL|closed by peer|UNAVAILABLE|heartbeat|CoordinationService", re.I
)


def initialize(
    coordinator: str | None, num_processes: int | None, process_index: int | None
) -> None:
    """Connect to the other processes of the run, before JAX creates devices.

    `coordinator` is HOST:PORT of process 0. If it is None, all three arguments are read from the
    environment of Slurm, Open MPI or a TPU pod. If there is no such environment either, this
    process trains alone. Raise a UserError if only some of the arguments are None, if the port is
    in use, or if the processes have different numbers for `num_processes`.
    """
    options = (coordinator, num_processes, process_index)
    if None in options and any(option is not None for option in options):
        raise UserError(
            "Only some of --coordinator, --num_processes and --process_index are set",
            "Set all three, or none of them",
        )
    # With "deactivate", JAX does not look for a launcher. A launcher would make JAX hide devices
    # from this process.
    method = "deactivate" if coordinator else _find_launcher()
    if not method:
        return
    # The runtime crashes if the port is in use, so the port is tried first.
    if coordinator and process_index == 0:
        _, _, port = coordinator.rpartition(":")
        try:
            socket.create_server(("", int(port))).close()
        except OSError as error:
            raise UserError(
                f"--coordinator={coordinator} cannot be used ({error.strerror})",
                "Choose another port",
            ) from error
    # If the processes have contradictory arguments, or if another process ends, the runtime prints
    # a message and aborts. Python's stack traces would hide that message.
    faulthandler.disable()
    # The runtime waits silently, and ends this process if the other processes do not connect.
    log("waiting for the other processes")
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_index,
        cluster_detection_method=method,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        # Process 0 may still be uploading the run's last files to a bucket.
        shutdown_timeout_seconds=3600,
    )
    # The runtime uses only process 0's `num_processes`, and the others may have another number.
    require_same({"--num_processes": num_processes})


@contextlib.contextmanager
def ends_together() -> Iterator[None]:
    """In a run of several processes, exit this process as soon as the body of `with` fails.

    Otherwise, this process would wait for the other processes to shut down or to finish a
    checkpoint, while they wait for this process to join a collective. In a run of one process, the
    error is raised as usual.
    """
    try:
        yield
    except BaseException as error:
        if not jax.distributed.is_initialized():
            raise
        message = "".join(traceback.format_exception(error))
        if is_lost_peer(error):
            message = (
                "error: Another process of this run has ended. "
                "Run the same commands again to continue."
            )
        message, code = describe_exit(error) or (message, 1)
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            code = error.code or 1
        exit_process(message, code)


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error usually means that another process of the run has ended."""
    is_of_jax = isinstance(error, jax.errors.JaxRuntimeError)
    return is_of_jax and bool(_LOST_PEER.search(str(error)))


def _find_launcher() -> str | None:
    """Return JAX's name of the launcher that started this process as one of several.

    Return None if the process is the only one, or if GPT2_ALONE is set in the environment.
    """
    variables = os.environ
    if ALONE in variables:
        return None
    counts = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "MEGASCALE_NUM_SLICES")
    several = {name for name in counts if int(variables.get(name) or 1) > 1}
    if "OMPI_COMM_WORLD_SIZE" in several:
        if "OMPI_MCA_orte_hnp_uri" in variables:
            return "ompi"
        # Open MPI 5 no longer sets that variable, and JAX then needs mpi4py.
        if importlib.util.find_spec("mpi4py") is None:
            raise UserError(
                "A run that mpirun starts needs the package mpi4py",
                "Run `pip install mpi4py`",
            )
        return "mpi4py"
    # With sbatch but without srun, SLURM_NTASKS is also set, although there is only one process.
    if "SLURM_NTASKS" in several and "SLURM_STEP_NODELIST" in variables:
        return "slurm"
    chips = Path("/dev/accel0").exists() or Path("/dev/vfio/0").exists()
    if not chips or importlib.util.find_spec("libtpu") is None:
        return None
    # Kubernetes lists the hosts of a pod in one of these variables, and Kaggle lists its only host.
    # On other machines JAX queries Google's metadata server, unless the query is disabled.
    hosts = variables.get("TPU_PROCESS_ADDRESSES")
    hosts = hosts or variables.get("TPU_WORKER_HOSTNAMES")
    if hosts:
        return "gketpu" if "," in hosts or "MEGASCALE_NUM_SLICES" in several else None
    if "TPU_SKIP_MDS_QUERY" in variables:
        return None
    return "gcetpu"


def only_first(function: Callable[P, R]) -> Callable[P, R | None]:
    """Return a function that runs in process 0, and returns None in the other processes."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        if jax.process_index() == 0:
            return function(*args, **kwargs)
        return None

    return guarded


def from_first(number: int) -> int:
    """Return the number that process 0 passed.

    Every process must call this function, because the calls wait for each other.
    """
    return int(from_all(f"{number:d}")[0])


def from_all(text: str) -> list[str]:
    """Return the strings that all processes pass, in the order of the processes' indices.

    Every process must call this function, because the calls wait for each other. The strings are
    exchanged through the coordinator, so JAX's devices need not exist yet.
    """
    if (client := global_state.client) is None:
        return [text]
    folder = f"gpt2/{next(_exchanges)}/"
    client.key_value_set(f"{folder}{global_state.process_id:09}", text)
    client.wait_at_barrier(folder, _DAY)
    return [text for _, text in sorted(client.key_value_dir_get(folder))]


def require_same(values: Mapping[str, object]) -> None:
    """Raise a UserError in every process if `values` differ between the processes of the run.

    Every process must call this function. The values must be representable in JSON.
    """
    first, *others = map(json.loads, from_all(json.dumps(values)))
    for index, other in enumerate(others, 1):
        changes = []
        for name, value in other.items():
            if value != first.get(name):
                changes.append(f"{name}={value}, not {first.get(name)}")
        if changes:
            # A process that exits while it is connected aborts the other processes.
            jax.distributed.shutdown()
            raise UserError(
                f"Unlike process 0, process {index} has {'; '.join(changes)}",
                "Start all processes with the same command, code and text",
            )
