"""One run as several processes, on JAX's own distributed runtime.

Every process runs the same command. They meet at the coordinator (process 0), which watches them.
If a process dies, the collective that waits for it fails or aborts. If the collective hangs
instead, the runtime misses the process's heartbeat and aborts.
"""

import contextlib
import ctypes
import faulthandler
import functools
import importlib.util
import os
import re
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from gpt2.errors import UserError, describe_end, tell, unheard

P = ParamSpec("P")
R = TypeVar("R")

# How long a process may be silent before it counts as dead.
HEARTBEAT_SECONDS = 20

LOST_PEER = (
    "error: another process of this run has ended, see its output. "
    "Start all of them again to continue from the last checkpoint."
)

# Words in the messages of collectives and of the runtime when a process is gone.
_LOST_PEER = re.compile("Gloo|NCCL|closed by peer|UNAVAILABLE|heartbeat|CoordinationService", re.I)


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
) -> None:
    """Joins the run's other processes, if there are any. Call it before JAX has devices.

    All three arguments describe the processes. Without them, Slurm, Open MPI or Cloud TPU does.
    Without any of these, there is a single process. The flags of train.py are checked before.

    Args:
        coordinator: HOST:PORT where process 0 listens.
        num_processes: how many there are.
        process_index: which one this is, from 0.

    Raises:
        UserError: the port is taken.
    """
    if coordinator is None:
        if _started_by_cluster():
            jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
            _explain_aborts()
        return
    if process_index == 0:
        _check_port(coordinator)
    # The runtime waits for the others silently, and ends the process if they do not come.
    print(
        f"process {process_index} of {num_processes} waits for the others at {coordinator}",
        file=sys.stderr,
        flush=True,
    )
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_index,
        cluster_detection_method="deactivate",  # or a launcher might hide devices
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )
    _explain_aborts()


def _check_port(coordinator: str) -> None:
    """Raises a UserError if the port is taken, since the runtime may crash on such a port."""
    try:
        socket.create_server(("", int(coordinator.rpartition(":")[2]))).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"process 0 cannot listen at {coordinator} ({error})", "Choose another port"
        ) from error


@contextlib.contextmanager
def ends_together() -> Iterator[None]:
    """Ends this process at once if the body fails, where there are several processes.

    Otherwise it would wait for the others to shut down or to finish a checkpoint, while they wait
    for it to join a collective.
    """
    with contextlib.ExitStack() as stack:
        stack.push(_end_process)
        yield


def _end_process(
    kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    if error is None or not jax.distributed.is_initialized():
        return
    if end := describe_end(error):
        message, code = end
    elif isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)):
        # The original message comes first, since a wrong network setup fails in the same way.
        said = str(error).strip().split("\n")[0]
        message, code = f"{said}\n{LOST_PEER}", 1
    else:
        message, code = "".join(traceback.format_exception(error)), 1
    tell(message)
    with unheard(sys.stdout):
        sys.stdout.flush()
    os._exit(code)


def _explain_aborts() -> None:
    """Makes an abort print what it most likely means: the runtime's words are for its developers.

    The handler has to be a C function, since aborts come on threads that Python does not know.
    """
    faulthandler.disable()  # the stacks of all threads would bury the message
    ctypes.CDLL(None).signal(signal.SIGABRT, _on_abort)


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_abort(_: int) -> None:
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"\n{LOST_PEER}\n".encode())
    os._exit(1)


def _started_by_cluster() -> bool:
    """Returns whether a launcher that JAX knows has started this process, maybe one of many."""
    slurm = int(os.environ.get("SLURM_NTASKS", 1)) > 1 and "SLURM_STEP_NODELIST" in os.environ
    open_mpi = "OMPI_MCA_orte_hnp_uri" in os.environ
    tpu_chips = Path("/dev/accel0").exists() or Path("/dev/vfio/0").exists()
    tpu = tpu_chips and importlib.util.find_spec("libtpu") is not None
    return slurm or open_mpi or (tpu and "TPU_SKIP_MDS_QUERY" not in os.environ)


def only_first(function: Callable[P, R]) -> Callable[P, R | None]:
    """Returns a function that runs in the first process; in the others it returns None at once."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if jax.process_index() == 0 else None

    return guarded


def from_first(number: int) -> int:
    """Returns process 0's `number` in every process, whatever the others read from their disks."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))
