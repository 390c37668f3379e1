"""The pmap backend: explicit data parallelism, with a replica of the state on each device.

Every device runs the step on its own rows. After the last micro-batch, `lax.psum` over a named axis
sums gradients and counts. The state has no device axis (`in_axes=(None, 0)`), so states and
checkpoints have the same format as in the pjit backend.
"""

from collections.abc import Callable

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gpt2.config import GPTConfig
from gpt2.ops import Ops
from gpt2.parallel.kernels import Terms, make_ops
from gpt2.parallel.matrices import Matrices
from gpt2.parallel.mesh import describe_mesh, local_rows
from gpt2.parallel.state_sharding import State
from gpt2.utils.platform import platform_of
from gpt2.utils.trees import Tree

AXIS = "data"


class PmapBackend:
    """The backend that replicates the state. `gpt2.parallel` documents its interface."""

    # Not "layer", because nothing is gathered: devices store whole parameters.
    gather_by = "step"

    def __init__(self, devices: list[jax.Device]):
        self.mesh = Mesh(np.array(devices), (AXIS,))
        self.num_shards = len(devices)
        self._devices = devices
        self.batch_sharding = NamedSharding(self.mesh, PartitionSpec(AXIS))
        self._replicated = NamedSharding(self.mesh, PartitionSpec())

    def make_ops(self, cfg: GPTConfig, terms: Terms) -> Ops:
        """Return the operations for a model that each device runs independently.

        `terms` names the options that change attention's scores in a way that no kernel supports.
        """
        return make_ops(cfg, self.mesh, terms)

    @property
    def matrices(self) -> Matrices:
        """The assignment of an optimizer's matrices to devices: each device computes all."""
        return Matrices(None, platform_of(self._devices[0]))

    @property
    def layout(self) -> str:
        """A description of the backend and its mesh, for the log."""
        return f"pmap, {describe_mesh(self.mesh)}"

    def state_shardings(self, state: State) -> State:
        """Return a tree like `state`, whose shardings replicate every leaf on all devices."""
        return jax.tree.map(lambda _: self._replicated, state)

    gradient_shardings = state_shardings

    def init_state(self, init_fn: Callable[[Array], State], key: Array) -> State:
        """Return `init_fn(key)`, which every device computes completely."""
        return jax.jit(init_fn, out_shardings=self._replicated)(key)

    def local_rows(self, batch_size: int) -> slice:
        """Return the slice of rows of a global batch that this process provides."""
        return local_rows(self.batch_sharding, batch_size)

    def put_batch(self, batch: dict) -> dict[str, Array]:
        """Put this process's rows `[local B, T]` on its devices, as `[devices, B / devices, T]`."""
        num_local = len(self.mesh.local_devices)
        return {
            name: jax.make_array_from_process_local_data(
                self.batch_sharding, rows.reshape(num_local, -1, *rows.shape[1:])
            )
            for name, rows in batch.items()
        }

    def batch_shape(self, size: int, length: int) -> tuple[int, ...]:
        """Return the shape of the arrays that `put_batch` returns for global batches `[B, T]`."""
        return self.num_shards, size // self.num_shards, length

    def compile_train(self, step: Callable) -> Callable:
        """Return `step`, pmapped, as `(state, batch) -> (state, metrics)`. It donates `state`."""
        return self.compile_eval(step, donate_argnums=0)

    def compile_eval(self, step: Callable, **options: Tree) -> Callable:
        """Return `step`, pmapped, as `(params, batch) -> sums and counts`.

        Every device holds all sums and counts. `options` are further arguments of `jax.pmap`.
        """

        def on_device(state, batch):
            return step(state, batch, _map_sum)

        return jax.pmap(
            on_device,
            axis_name=AXIS,
            in_axes=(None, 0),
            out_axes=None,
            devices=self._devices,
            **options,
        )

    compile_watch = compile_eval


def _map_sum(function: Callable) -> Callable:
    """Return a function of `(params, batch)` that sums `function` over all devices.

    Each device calls `function(params, rows, device)` with its rows of the batch and its index. The
    result is the sum of the trees of arrays that the calls return.
    """

    def mapped(params, batch):
        device = jax.lax.axis_index(AXIS)
        sums = function(params, batch, device)
        return jax.lax.psum(sums, AXIS)

    return mapped
