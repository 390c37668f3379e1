"""Train runs on the nodes of a Ray cluster."""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpt2.errors import UserError
from gpt2.lab.experiments.processes import SANDBOX, LocalSlot

# What `RayProcess.poll` returns if the node was lost. Exit codes are smaller.
NODE_LOST = 256
# Environment variables that a run inherits from this command. It inherits all other variables from
# `ray start`.
_VARIABLES = ("GPT2_DATA_DIR", "WANDB_RUN_GROUP", SANDBOX)


class RaySlot(NamedTuple):
    """The resources that Ray reserves for one run at a time."""

    options: dict[str, Any]  # arguments of ray.remote

    def start(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> "RayProcess":
        """Start a process that runs `command` on a node of the Ray cluster.

        `command` is the path of a Python file, and its arguments. The process appends its output to
        `log`. Its environment variables are those of `ray start`, those in `environment`, and the
        variables in `_VARIABLES` that this process has.
        """
        import ray

        variables = dict(environment)
        for name in _VARIABLES:
            if name in os.environ:
                variables[name] = os.environ[name]
        # Ray must not repeat the call, because the process may still be saving its state.
        remote = ray.remote(max_retries=0, **self.options)(_run)
        return RayProcess(ray, remote.remote(os.getcwd(), command, log, variables))


def make_ray_slots(jobs: int | None) -> list[RaySlot]:
    """Return the resources of runs on the cluster that this process has joined.

    A run reserves one GPU. In a cluster without GPUs, it reserves the TPU chips of a host or, in a
    cluster without TPUs, the CPU cores of a host. `jobs` is the number of simultaneous runs, or
    None for as many as possible. If there are more jobs than hosts, each run reserves fewer cores.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for kind in ("GPU", "TPU", "CPU"):
        sizes = [int(node[kind]) for node in nodes if kind in node]
        if sizes:
            break
    else:
        raise UserError(
            "The Ray cluster has no GPU, TPU or CPU cores",
            "Run `ray start --address=HOST:6379` on further machines",
        )
    number = jobs or len(sizes)
    options: dict[str, Any]
    if kind == "GPU":
        number = jobs or sum(sizes)
        options = {"num_gpus": 1}
    elif kind == "TPU":
        options = {"resources": {"TPU": min(sizes)}}
    else:
        cores = min(*sizes, sum(sizes) // number)
        options = {"num_cpus": max(cores, 1)}
    return [RaySlot(options)] * number


class RayProcess:
    """A process on a node of the cluster, with some of the methods of `subprocess.Popen`."""

    def __init__(self, ray: Any, end: Any):
        self._ray = ray
        self._end = end  # a reference to the result of `_run`
        # The duration of the process, without the time in Ray's queue. It is 0 until the process
        # has ended.
        self.seconds = 0.0

    def poll(self) -> int | None:
        """Return the exit code, NODE_LOST if the node was lost, or None while the process runs."""
        errors = self._ray.exceptions
        try:
            code, self.seconds = self._ray.get(self._end, timeout=0)
            return code
        except errors.GetTimeoutError:
            return None
        except errors.OutOfMemoryError:
            return -signal.SIGKILL
        except errors.RayTaskError as error:
            raise UserError(
                f"A node of the Ray cluster cannot start a run: {error.cause}",
                "All nodes need the same folders and packages: see docs/cluster.md",
            ) from error
        except errors.RayError:
            return NODE_LOST

    def terminate(self) -> None:
        """Send SIGTERM to the process."""
        self._ray.cancel(self._end)

    def wait(self) -> None:
        """Wait until the process has ended."""
        self._ray.wait([self._end])


def _run(
    folder: str, command: Sequence[str], log: Path, environment: Mapping[str, str]
) -> tuple[int, float]:
    """Run a Python file in a worker of Ray, with the working directory `folder`.

    Return the exit code, and the duration in seconds.
    """
    began = time.monotonic()
    os.chdir(folder)
    os.environ.update(environment)
    process = LocalSlot(os.sched_getaffinity(0), {}).start(command, log, {})
    try:
        while process.poll() is None:
            # Ray can interrupt this loop, but not a call of process.wait.
            time.sleep(0.2)
        return process.returncode, time.monotonic() - began
    finally:
        process.terminate()
        process.wait()
