"""Spreads one program over devices: the mesh, the rules, and two backends with one interface.

init_state(init_fn, key) -> state           placed; under pjit, each device draws its part alone
state_shardings(state)   -> shardings       of a state of arrays or shapes
local_rows(batch_size)   -> slice           this process's rows of a global batch
put_batch(host_batch)    -> device arrays   from this process's rows
batch_shapes(shape, names)                  the same without values
layout                   -> text            mesh, and when parameters are gathered
gradient_shardings(params)                  while micro-batches add up
compile_train(step)      -> (state, batch) -> (state, metrics)     state donated
compile_watch(step)      -> (state, batch) -> statistics           nothing donated
compile_eval(step)       -> (params, batch) -> metrics

A state is any pytree with `params` and `opt_state`, see state.py.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from gpt2.config import ParallelConfig, RulesConfig
from gpt2.errors import UserError
from gpt2.parallel.mesh import make_mesh
from gpt2.parallel.pjit import PjitBackend
from gpt2.parallel.pmap import PmapBackend
from gpt2.parallel.rules import Rules
from gpt2.parallel.state import State

Backend = PjitBackend | PmapBackend


def make_backend(
    parallel: ParallelConfig,
    logical_axes: Any,
    devices: list[jax.Device] | None = None,
    *,
    gather_by: str = "step",
) -> Backend:
    """Returns the backend that `parallel.backend` names, over all devices unless some are given.

    Args:
        parallel: the `parallel.` options.
        logical_axes: names of every parameter's axes, as `GPT.logical_axes` gives them.
        devices: all of the cluster's, if not given.
        gather_by: what `parallel.fsdp_gather=auto` stands for.
    """
    mesh = make_mesh(parallel, devices)
    if parallel.backend == "pmap":
        return PmapBackend(list(mesh.devices.flat))
    _refuse_idle_rules(parallel.rules, logical_axes)
    chosen = gather_by if parallel.fsdp_gather == "auto" else parallel.fsdp_gather
    backend = PjitBackend(mesh, logical_axes, Rules.from_config(parallel), chosen)
    if mesh.shape["fsdp"] > 1:
        if parallel.fsdp_gather == "layer" != backend.gather_by:
            raise UserError(
                "parallel.fsdp_gather=layer gathers nothing: kernels and tables are gathered by "
                "layer where parallel.rules.embed and parallel.rules.table split them over fsdp",
                "Use --config.parallel.fsdp_gather=step",
            )
        if not backend.is_split:
            raise UserError(
                "parallel.fsdp has nothing to split, since no rule of a parameter names it",
                "Use --config.parallel.rules.embed=fsdp",
            )
    return backend


def _refuse_idle_rules(rules: RulesConfig, logical_axes: Any) -> None:
    """Refuses a rule that was changed for an axis that no parameter has."""
    specs = jax.tree.leaves(logical_axes, is_leaf=lambda node: isinstance(node, PartitionSpec))
    present = {name for spec in specs for name in spec} | {"sequence"}
    for name in RulesConfig.names():
        usual = getattr(RulesConfig(), name)
        if name not in present and (value := getattr(rules, name)) != usual:
            raise UserError(
                f"parallel.rules.{name}={value} is ignored: no parameter has that axis",
                f"Use --config.parallel.rules.{name}={usual}",
            )


def abstract_state(backend: Backend, init_fn: Callable[[jax.Array], State]) -> State:
    """Returns the shapes, dtypes and shardings of the state that `init_fn(key)` would give."""
    shapes = jax.eval_shape(init_fn, jax.random.key(0))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        backend.state_shardings(shapes),
    )


def gather_whole(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Returns a tree whole on this process's first device. Every process must call it."""
    whole = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))(tree)
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), whole)
