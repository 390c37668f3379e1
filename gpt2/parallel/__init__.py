"""Distribute a program over devices: the mesh, the rules, and two backends with one interface.

The interface of a backend:

    init_state(init_fn, key) -> state      a new state; with pjit, each device draws only its shards
    state_shardings(state) -> shardings    the shardings of a state of arrays or shapes
    local_rows(batch_size) -> slice        the rows of a global batch that this process provides
    put_batch(host_batch) -> batch         device arrays that hold this process's rows
    batch_shape(size, length)              the shape of these arrays
    batch_sharding                         the sharding of these arrays
    num_shards -> int                      the number of devices that split the batch
    gather_by -> str                       when devices gather parameters: `step` or `layer`
    make_ops(cfg, terms) -> Ops            the operations that a model calls in a step
    matrices -> Matrices                   the assignment of an optimizer's matrices to devices
    layout -> str                          the mesh, and when parameters are gathered, for the log
    gradient_shardings(params)             shardings of gradients while micro-batches accumulate
    compile_train(step)                    (state, batch) -> (state, metrics); donates the state
    compile_watch(step)                    (state, batch) -> norms
    compile_eval(step)                     (params, batch) -> sums and counts

A state is any pytree with `params` and `opt_state`; see state_sharding.py.
"""

from typing import Any

import jax

from gpt2.config import ParallelConfig
from gpt2.parallel.mesh import check_layout, find_devices, make_mesh
from gpt2.parallel.pjit import PjitBackend
from gpt2.parallel.pmap import PmapBackend
from gpt2.parallel.rules import Rules
from gpt2.parallel.state_sharding import gather_whole

Backend = PjitBackend | PmapBackend


def make_backend(
    parallel: ParallelConfig,
    logical_axes: Any,
    devices: list[jax.Device] | None = None,
    *,
    gather_by: str = "step",
    rules: Rules | None = None,
) -> Backend:
    """Return the backend that `parallel.backend` names, on `devices` (by default, all devices).

    `logical_axes` is a tree with a PartitionSpec of axis names for each parameter, such as
    `GPT.logical_axes` returns. A model with other axis names needs its own `rules`. `gather_by`
    (`step` or `layer`) says when devices gather parameters if `parallel.fsdp_gather` is `auto`.
    """
    mesh = make_mesh(parallel, devices)
    if parallel.backend == "pmap":
        return PmapBackend(list(mesh.devices.flat))
    if parallel.fsdp_gather != "auto":
        gather_by = parallel.fsdp_gather
    rules = rules or Rules.from_config(parallel)
    return PjitBackend(mesh, logical_axes, rules, gather_by)
