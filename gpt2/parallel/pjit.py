"""The GSPMD backend: `jax.jit` with shardings over a mesh of data, fsdp and tensor axes.

Rows of the batch are split over `data` x `fsdp` shards. Each shard's sum of gradients is its own
slice of a `vmap`, so that micro-batches add up where they are. Gradients cross the network only in
the one sum over shards that follows. Parameters are gathered over `fsdp` once per step, and their
gradients are scattered back. XLA derives what `tensor` needs from the model's constraints.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gpt2.parallel import following, rules
from gpt2.parallel.mesh import batch_sharding, local_rows
from gpt2.parallel.state import State


class PjitBackend:
    """Runs steps over a mesh. See `gpt2.parallel.make_backend`.

    Args:
        mesh: with the axes of `rules.MESH_AXES`.
        logical_axes: names of every parameter's axes, as `GPT.logical_axes` gives them.
    """

    def __init__(self, mesh: Mesh, logical_axes: Any):
        self.mesh = mesh
        self.num_shards = mesh.shape["data"] * mesh.shape["fsdp"]
        self._storage = rules.specs(logical_axes, rules.STORAGE)
        self._compute = rules.specs(logical_axes, rules.COMPUTE)
        self._batch_sharding = batch_sharding(mesh)

    def state_shardings(self, state: State) -> State:
        """Returns the sharding of every leaf of a state (of arrays or shapes)."""
        opt_state = following.specs(state.opt_state, state.params, self._storage, self.mesh)
        whole = jax.tree.map(lambda _: PartitionSpec(), state)
        return self._on_mesh(whole.replace(params=self._storage, opt_state=opt_state))

    def init_state(self, init_fn: Callable[[jax.Array], State], key: jax.Array) -> State:
        """Returns `init_fn(key)`, each device computing only its own part of it."""
        shardings = self.state_shardings(jax.eval_shape(init_fn, key))
        return jax.jit(init_fn, out_shardings=shardings)(key)

    def local_rows(self, batch_size: int) -> slice:
        """Returns which rows of a global batch this process has to provide."""
        return local_rows(self._batch_sharding, batch_size)

    def put_batch(self, batch: dict) -> dict[str, jax.Array]:
        """Places this process's rows [B local, T] of a global batch on its devices."""
        return {
            name: jax.make_array_from_process_local_data(self._batch_sharding, rows)
            for name, rows in batch.items()
        }

    def compile_train(self, step: Callable) -> Callable:
        """Returns the jitted `(state, batch) -> (state, metrics)`; the state is donated."""

        def train_step(state, batch):
            with rules.spread_activations(self.mesh):
                state, metrics = step(state, batch, self._map_sum)
            return jax.lax.with_sharding_constraint(state, self.state_shardings(state)), metrics

        return jax.jit(train_step, donate_argnums=0)

    def compile_eval(self, step: Callable) -> Callable:
        """Returns the jitted `(params, batch) -> metrics`."""

        def eval_step(params, batch):
            with rules.spread_activations(self.mesh):
                return step(params, batch, self._map_sum)

        return jax.jit(eval_step)

    def _map_sum(self, function: Callable) -> Callable:
        """The `map_sum` of `gpt2.training.steps`: a vmap over shards of the batch, then one sum."""

        def mapped(params, batch):
            if self.num_shards == 1:
                return function(params, batch, 0)
            params = jax.lax.with_sharding_constraint(params, self._on_mesh(self._compute))
            shards = jax.tree.map(
                lambda x: x.reshape(self.num_shards, x.shape[0] // self.num_shards, *x.shape[1:]),
                batch,
            )
            over_shards = jax.vmap(function, in_axes=(None, 0, 0), spmd_axis_name=rules.BATCH_AXES)
            sums, grads = over_shards(params, shards, jnp.arange(self.num_shards))
            return self._sum_shards(sums, grads)

        return mapped

    def _sum_shards(self, sums, grads):
        """Adds up what each shard holds: leaves [shards, ...], split over the batch axes.

        The collectives are explicit. XLA's partitioner would reduce whole gradients and drop what a
        device does not store, although a reduce-scatter moves half the bytes.
        """
        # Axes of size 1 are left out, since a collective over one is not always optimised away.
        axes = tuple(axis for axis in rules.BATCH_AXES if self.mesh.shape[axis] > 1)

        def reduce_gradient(x, spec):
            split = ["fsdp" in jax.tree.leaves(entry) for entry in spec]
            if "fsdp" not in axes or not any(split):
                return jax.lax.psum(x, axes)
            x = jax.lax.psum_scatter(x, "fsdp", scatter_dimension=split.index(True), tiled=True)
            return jax.lax.psum(x, "data") if "data" in axes else x

        def reduce_tree(sums, grads):
            sums, grads = jax.tree.map(lambda x: x[0], (sums, grads))
            if grads is not None:
                grads = jax.tree.map(reduce_gradient, grads, self._storage)
            return jax.lax.psum(sums, axes), grads

        def stacked(specs):
            return jax.tree.map(lambda spec: PartitionSpec(axes, *spec), specs)

        scalar = jax.tree.map(lambda _: PartitionSpec(), sums)
        compute, storage = (None, None) if grads is None else (self._compute, self._storage)
        return jax.shard_map(
            reduce_tree,
            mesh=self.mesh,
            in_specs=(stacked(scalar), stacked(compute)),
            out_specs=(scalar, storage),
        )(sums, grads)

    def _on_mesh(self, specs: Any) -> Any:
        return jax.tree.map(partial(NamedSharding, self.mesh), specs)
