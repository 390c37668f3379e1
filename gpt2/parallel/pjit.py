"""The GSPMD backend: `jax.jit` with shardings over a mesh of data, fsdp and tensor axes.

The rows of a batch are split over `data` x `fsdp`. A `shard_map` over these two axes runs the step
on each device's rows, so that gradients of micro-batches accumulate without communication. XLA
derives the collectives over `tensor` from the model's sharding constraints. `parallel.fsdp_gather`
determines when parameters are gathered over `fsdp`:

step    All parameters are gathered before the first micro-batch. Each device accumulates whole
        gradients, which are scattered after the last micro-batch.
layer   Each kernel and table is gathered where the model uses it, in the compute dtype, in both
        the forward and the backward pass. Its gradient is scattered immediately and accumulates in
        shards (see gpt2/ops/fsdp.py). If the axis `tensor` has several devices, parameters are
        gathered as with `step`.

Gradients are summed over the axis `data` once, after the last micro-batch.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gpt2.config import GPTConfig
from gpt2.ops import Ops
from gpt2.ops.fsdp import Shards
from gpt2.parallel import rules
from gpt2.parallel.kernels import Terms, make_ops
from gpt2.parallel.matrices import Matrices
from gpt2.parallel.mesh import describe_mesh, local_rows
from gpt2.parallel.rules import Rules
from gpt2.parallel.state_sharding import State, check_split, optimizer_specs
from gpt2.utils.platform import jit_is_off, platform_of
from gpt2.utils.trees import Tree


class PjitBackend:
    """The backend that runs steps over a mesh. `gpt2.parallel` documents its interface."""

    def __init__(
        self,
        mesh: Mesh,
        logical_axes: Tree,
        layout_rules: Rules,
        gather_by: str = "step",
    ):
        self.mesh = mesh
        self.rules = layout_rules
        self.num_shards = mesh.shape["data"] * mesh.shape["fsdp"]
        self._tensor = mesh.shape["tensor"]
        # The reference implementations, which run if jit is off, need whole parameters. The end of
        # this method also sets "step", if the rules allow no parameter to be gathered by layer.
        self.gather_by = "step" if jit_is_off() else gather_by
        self._storage = rules.specs(logical_axes, layout_rules.storage)
        self._optimizer = rules.specs(logical_axes, layout_rules.optimizer)
        self._compute = rules.specs(logical_axes, layout_rules.compute)
        self.batch_sharding = NamedSharding(mesh, PartitionSpec(rules.BATCH_AXES))
        # Axes of size 1 are left out, because XLA does not always remove collectives over them.
        self._batch_axes = tuple(
            axis for axis in rules.BATCH_AXES if mesh.shape[axis] > 1
        )
        self._leaves = jax.tree.map(
            self._make_leaf,
            logical_axes,
            self._optimizer,
            self._compute,
        )
        if not any(leaf.by_layer for leaf in jax.tree.leaves(self._leaves)):
            self.gather_by = "step"

    def _make_leaf(
        self,
        names: PartitionSpec,
        reduced: PartitionSpec,
        compute: PartitionSpec,
    ) -> "_Leaf":
        split = [
            dim for dim, axes in enumerate(reduced) if "fsdp" in jax.tree.leaves(axes)
        ]
        if self.mesh.shape["fsdp"] == 1 or not split:
            return _Leaf(compute)
        axis = rules.gathered_axis(tuple(names), self.mesh, self.rules)
        if self.gather_by == "layer" and axis is not None:
            return _Leaf(reduced, split[0], by_layer=True)
        tensor = 1
        if "tensor" in jax.tree.leaves(reduced[split[0]]):
            tensor = self._tensor
        return _Leaf(compute, split[0], tensor=tensor)

    def make_ops(self, cfg: GPTConfig, terms: Terms) -> Ops:
        """Return the operations for a model that each device runs on its own rows of the batch.

        `terms` names the options that change attention's scores in a way that no kernel supports.
        """
        by_layer = self.gather_by == "layer"
        return make_ops(cfg, self.mesh, terms, self.rules, gathers_by_layer=by_layer)

    @property
    def matrices(self) -> Matrices:
        """The assignment of an optimizer's whole matrices to devices: each matrix to one device."""
        return Matrices(self.mesh, platform_of(self.mesh.devices.flat[0]))

    @property
    def layout(self) -> str:
        """A description of the backend, its mesh, and when parameters are gathered, for the log."""
        strategy = self.rules.strategy
        parts = ["pjit", describe_mesh(self.mesh)]
        if strategy != "auto":
            parts.append(strategy)
        if self.mesh.shape["fsdp"] > 1 and strategy != "zero1":
            when = "once per step" if self.gather_by == "step" else "at each layer"
            parts.append(f"parameters gathered {when}")
        return ", ".join(parts)

    def state_shardings(self, state: State) -> State:
        """Return the sharding of every leaf of a state, whose leaves may be arrays or shapes.

        Raise a UserError if the mesh cannot split a leaf evenly.
        """
        opt_state = optimizer_specs(
            state.opt_state, state.params, self._optimizer, self.mesh
        )
        replicated = jax.tree.map(lambda _: PartitionSpec(), state)
        specs = replicated.replace(params=self._storage, opt_state=opt_state)
        shardings = self._on_mesh(specs)
        jax.tree.map_with_path(check_split, state, shardings)
        # An optimizer without state has no leaf to check, but its gradients are split.
        split = self._on_mesh(self._optimizer)
        jax.tree.map_with_path(check_split, state.params, split)
        return shardings

    def gradient_shardings(self, params: Tree) -> Tree:
        """Return the shardings of the gradients while micro-batches accumulate."""
        return self._on_mesh(jax.tree.map(lambda leaf: leaf.spec, self._leaves))

    def init_state(self, init_fn: Callable[[Array], State], key: Array) -> State:
        """Return `init_fn(key)`, with each device computing only its own shards."""
        shapes = jax.eval_shape(init_fn, key)
        shardings = self.state_shardings(shapes)
        return jax.jit(init_fn, out_shardings=shardings)(key)

    def local_rows(self, batch_size: int) -> slice:
        """Return the slice of rows of a global batch that this process provides."""
        return local_rows(self.batch_sharding, batch_size)

    def put_batch(self, batch: dict) -> dict[str, Array]:
        """Put this process's rows `[local B, T]` of a global batch on its devices."""
        put = partial(jax.make_array_from_process_local_data, self.batch_sharding)
        return jax.tree.map(put, batch)

    def batch_shape(self, size: int, length: int) -> tuple[int, ...]:
        """Return the shape of the arrays that `put_batch` returns for global batches `[B, T]`."""
        return size, length

    def compile_train(self, step: Callable) -> Callable:
        """Return `step`, jitted, as `(state, batch) -> (state, metrics)`. It donates `state`."""

        def train_step(state, batch):
            state, metrics = step(state, batch, self._map_sum)
            shardings = self.state_shardings(state)
            return jax.lax.with_sharding_constraint(state, shardings), metrics

        return jax.jit(train_step, donate_argnums=0)

    def compile_watch(self, step: Callable) -> Callable:
        """Return `step`, jitted, as `(state, batch) -> norms`. Every device holds all norms."""
        replicated = NamedSharding(self.mesh, PartitionSpec())
        watch_step = partial(step, map_sum=self._map_sum)
        return jax.jit(watch_step, out_shardings=replicated)

    def compile_eval(self, step: Callable) -> Callable:
        """Return `step`, jitted, as `(params, batch) -> {name: (sum, count)}`."""
        map_sum = partial(self._map_sum, with_gradients=False)
        return jax.jit(partial(step, map_sum=map_sum))

    def _map_sum(self, function: Callable, with_gradients: bool = True) -> Callable:
        """Return a function of `(params, batch)` that sums `function` over all devices.

        Each device calls `function(params, rows, device) -> (sums, gradients)` with its rows of the
        batch and its index. Both results are summed over all devices, and the gradients are sharded
        as in the optimizer's state. XLA's partitioner adds the collectives over the axis `tensor`.
        If `function` returns None instead of gradients, pass `with_gradients=False`.
        """
        manual = rules.MESH_AXES if self._tensor == 1 else rules.BATCH_AXES

        def on_device(params, rows):
            if self._tensor > 1:
                on_trace = partial(rules.on_trace, self.mesh)
                shardings = jax.tree.map(on_trace, self._compute)
                params = jax.lax.with_sharding_constraint(params, shardings)
            device = jax.lax.axis_index(rules.BATCH_AXES)
            sums, grads = function(params, rows, device)
            if with_gradients:
                grads = self._sum_gradients(grads)
            return jax.lax.psum(sums, self._batch_axes), grads

        def mapped(params, batch):
            if self.num_shards == 1:
                return function(params, batch, 0)
            shardings = self.gradient_shardings(params)
            params = jax.lax.with_sharding_constraint(params, shardings)
            in_specs = jax.tree.map(_Leaf.in_spec, self._leaves)
            out_specs = None
            if with_gradients:
                out_specs = jax.tree.map(_Leaf.out_spec, self._leaves)
            on_devices = jax.shard_map(
                on_device,
                mesh=self.mesh,
                in_specs=(in_specs, PartitionSpec(rules.BATCH_AXES)),
                out_specs=(PartitionSpec(), out_specs),
                axis_names={*manual},
                check_vma=False,
            )
            sums, grads = on_devices(params, batch)
            if with_gradients:
                grads = jax.tree.map(lambda g, p: g.reshape(p.shape), grads, params)
            return sums, grads

        return mapped

    def _sum_gradients(self, grads: Tree) -> Tree:
        """Sum gradients over the devices that split the batch, and return this device's part.

        The collectives are explicit, because XLA's partitioner would all-reduce whole gradients and
        discard the parts that a device does not store, although a reduce-scatter sends half the
        bytes.
        """
        leaves = self._leaves

        def sum_all(grads):
            return jax.tree.map(self._sum_gradient, leaves, grads)

        if self._tensor == 1:
            return sum_all(grads)
        specs = jax.tree.map(_Leaf.separated_spec, leaves, self._compute)
        # `tensor` splits the gradients, and each device sums only its own slice.
        sum_separated = jax.shard_map(
            sum_all,
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=(specs,),
            out_specs=specs,
            axis_names={"tensor"},
            check_vma=False,
        )
        separated = jax.tree.map(_Leaf.separate_tensor, leaves, grads)
        return sum_separated(separated)

    def _sum_gradient(self, leaf: "_Leaf", grad: Array) -> Array:
        if leaf.dim < 0:
            return jax.lax.psum(grad, self._batch_axes)
        if not leaf.by_layer:
            shards = Shards(leaf.separated_dim, rules.fsdp_stages(self.mesh))
            grad = shards.scatter(grad)
        if "data" in self._batch_axes:
            return jax.lax.psum(grad, "data")
        return grad

    def _on_mesh(self, specs: Tree) -> Tree:
        return jax.tree.map(partial(NamedSharding, self.mesh), specs)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """The shardings of a parameter and its gradient, inside and outside the step's `shard_map`.

    For example, with `fsdp=2` and `tensor=2`, the MLP's first kernel `[D, F]` has the spec
    `(None, "tensor")` and the dim 0: `tensor` splits F, and `fsdp` splits D of the summed gradient.
    Its bias `[F]` has the spec `("tensor",)` and the dim -1.

    Attributes:
        spec: sharding of the parameter when the step begins.
        dim: the axis that `fsdp` splits in the optimizer's state and in the summed gradient, or -1
            if `fsdp` splits no axis.
        by_layer: whether devices receive shards of the parameter and gather them by layer.
        tensor: the number of parts into which `tensor` splits the axis `dim`; `fsdp` then splits
            each part.
    """

    spec: PartitionSpec
    dim: int = -1
    by_layer: bool = False
    tensor: int = 1

    def in_spec(self) -> PartitionSpec:
        """Return how `fsdp` splits the parameter that enters the `shard_map`."""
        if not self.by_layer:
            return PartitionSpec()
        return PartitionSpec(*[None] * self.dim, "fsdp")

    def out_spec(self) -> PartitionSpec:
        """Return how `fsdp` splits the summed gradient that leaves the `shard_map`."""
        if self.dim < 0:
            return PartitionSpec()
        return PartitionSpec(*[None] * self.separated_dim, "fsdp")

    @property
    def separated_dim(self) -> int:
        """The index of the axis `dim` in the result of `separate_tensor`."""
        return self.dim + (self.tensor > 1)

    def separate_tensor(self, grad: Array) -> Array:
        """Reshape a gradient so that `tensor` and `fsdp` split two axes, not the same axis."""
        if self.tensor == 1:
            return grad
        before = grad.shape[: self.dim]
        after = grad.shape[self.dim + 1 :]
        return grad.reshape(*before, self.tensor, -1, *after)

    def separated_spec(self, compute: PartitionSpec) -> PartitionSpec:
        """Return how `tensor` splits the result of `separate_tensor`."""
        if self.tensor == 1:
            return compute
        before = compute[: self.dim + 1]
        after = compute[self.dim + 1 :]
        return PartitionSpec(*before, None, *after)
