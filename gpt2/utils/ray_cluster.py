"""Connect this process to a Ray cluster, and call functions on the nodes of the cluster."""

import functools
import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import Executor, Future

from gpt2.errors import UserError

_SECONDS = 5.0  # time limit for an answer from the address of a cluster
_is_connected = False  # whether `connect` has joined a cluster


def connect(cluster: str) -> None:
    """Join the Ray cluster that `cluster`, the value of `--cluster`, names: `ray[:ADDRESS]`.

    Without ADDRESS, join the cluster in $RAY_ADDRESS or, if this variable is not set, the cluster
    to which this machine belongs. If `cluster` is empty, do nothing. Raise a UserError if the
    cluster cannot be reached, or if the package ray is not installed.
    """
    global _is_connected
    if not cluster:
        return
    kind, _, address = cluster.partition(":")
    if kind != "ray":
        raise UserError(
            f"--cluster={cluster} is not ray or ray:ADDRESS",
            "Use for example --cluster=ray:HOST:6379",
        )
    try:
        import ray
    except ModuleNotFoundError:
        raise UserError(
            f"--cluster={cluster} needs the package ray",
            "Run `pip install -e '.[ray]'`",
        ) from None
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        host, _, port = address.rpartition(":")
        if host:
            # If nobody answers, ray.init would try again for minutes.
            socket.create_connection((host, int(port)), _SECONDS).close()
        ray.init(address, logging_level=logging.WARNING, log_to_driver=False)
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise UserError(
            f"The Ray cluster of --cluster={cluster} cannot be reached ({reason})",
            "Start a cluster with `ray start --head` on a machine HOST, and use "
            "--cluster=ray:HOST:6379",
        ) from None
    _is_connected = True


def is_connected() -> bool:
    """Return whether this process has joined a Ray cluster."""
    return _is_connected


class RayExecutor(Executor):
    """An executor that calls functions on the nodes of the Ray cluster that `connect` has joined.

    If a node is lost, the functions that it was executing are called again on other nodes.

    Attributes:
        num_workers: the number of calls that the cluster can execute at a time.
    """

    def __init__(self) -> None:
        import ray

        # With the cache, each function is sent to the cluster only once.
        self._make_remote = functools.cache(ray.remote(max_retries=-1))
        self.num_workers = int(ray.cluster_resources().get("CPU", 1))

    def submit(self, function: Callable, /, *arguments: object) -> Future:  # type: ignore[override]
        """Call a function on a node, and return the future of its result."""
        return self._make_remote(function).remote(*arguments).future()
