"""Spreads one program over devices: the mesh, the rules, and two backends with one interface.

    init_state(init_fn, key) -> state           placed; under pjit, each device draws its part alone
    state_shardings(state)   -> shardings       of a state of arrays or shapes
    local_rows(batch_size)   -> slice           this process's rows of a global batch
    put_batch(host_batch)    -> device arrays   from this process's rows
    batch_shape(size, length), batch_sharding   of these arrays
    make_ops(cfg, terms)     -> Ops            what the model computes with in a step
    matrices                 -> Matrices       where optimizers compute whole matrices
    layout                   -> text            mesh, and when parameters are gathered
    gradient_shardings(params)                  while micro-batches add up
    compile_train(step)      -> (state, batch) -> (state, metrics)     state donated
    compile_watch(step)      -> (state, batch) -> norms                nothing donated
    compile_eval(step)       -> (params, batch) -> sums and counts

A state is any pytree with `params` and `opt_state`, see state.py.
"""

from typing import Any

import jax

from gpt2.config import ParallelConfig
from gpt2.parallel.mesh import check_layout, find_devices, make_mesh
from gpt2.parallel.pjit import PjitBackend
from gpt2.parallel.pmap import PmapBackend
from gpt2.parallel.rules import Rules
from gpt2.parallel.state import gather_whole

Backend = PjitBackend | PmapBackend


def make_backend(
    parallel: ParallelConfig,
    logical_axes: Any,
    devices: list[jax.Device] | None = None,
    *,
    gather_by: str = "step",
    rules: Rules | None = None,
) -> Backend:
    """Returns the backend that `parallel.backend` names, over all devices unless some are given.

    `logical_axes` are those of `GPT.logical_axes`, or of another model with `rules` of its own;
    `gather_by` is what `fsdp_gather=auto` means.
    """
    mesh = make_mesh(parallel, devices)
    if parallel.backend == "pmap":
        return PmapBackend(list(mesh.devices.flat))
    chosen = gather_by if parallel.fsdp_gather == "auto" else parallel.fsdp_gather
    return PjitBackend(
        mesh,
        logical_axes,
        rules or Rules.from_config(parallel),
        chosen,
    )
