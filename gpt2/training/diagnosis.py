"""Find the first tensor with NaN or Inf after a run diverged.

Training steps compute nothing extra for this. The diagnosis needs the state before the bad step. A
run with a guard, which skips bad steps (guard.py), still has this state. Otherwise, the diagnosis
repeats the run from the newest checkpoint to the bad step. It then runs the bad step with a program
that checks every parameter, the output of every module, the loss and every gradient. If a
validation loss was not finite, the diagnosis checks only the parameters.
"""

import dataclasses
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from gpt2.data import Dataset
from gpt2.errors import DivergedError, UserError
from gpt2.model.gpt import Params
from gpt2.parallel import gather_whole
from gpt2.parallel.compiled import CompiledSteps, run_alone
from gpt2.training.batches import Batches
from gpt2.training.checkpoint import Checkpointer
from gpt2.training.program import Program
from gpt2.training.state import TrainState
from gpt2.training.statistics import by_name
from gpt2.training.steps import MapSum, on_one_device
from gpt2.training.workdir import find_start
from gpt2.utils.accumulate import accumulate
from gpt2.utils.prng import dropout_key
from gpt2.utils.scan import report
from gpt2.utils.trees import Batch, Sums, Tree

_FINITE = "the same step is finite when repeated"
_LAYER = re.compile(r"^h_(\d+)")
_BAD_OUTPUT = "has NaN or Inf"  # a name that no user's module reports


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """A search for the first tensor with NaN or Inf, after a run has diverged.

    `first_state(program, dataset)` returns the state before step 1.
    """

    program: Program
    batches: Batches
    workdir: Path
    checkpointer: Checkpointer
    steps: CompiledSteps
    first_state: Callable[[Program, Dataset], TrainState]

    def explain(self, error: DivergedError, state: TrainState) -> UserError:
        """Return the error that ends the run, and that names the first tensor with NaN or Inf.

        `state` is the newest state. Its arrays may be deleted, to free memory for the diagnosis.
        """
        self.checkpointer.wait()
        try:
            origin = self._find_origin(error, state)
        # A failure of the diagnosis, such as a lack of memory, must not replace the error itself.
        except Exception as failure:
            origin = f"the first tensor with NaN or Inf was not found ({failure})"
        remedy = "Lower --config.optim.learning_rate"
        if origin == _FINITE:
            remedy = "Check the hardware, and whether batches change when they are read again"
        return UserError(f"{error}: {origin}", remedy, exit_code=3)

    def _find_origin(self, error: DivergedError, state: TrainState) -> str:
        program = self.program
        mesh = program.backend.mesh
        if not error.before:
            params = gather_whole(state.eval_params, mesh)
            for name, weight in by_name(params).items():
                if _is_bad(weight):
                    return f"parameter {name} was the first tensor with NaN or Inf"
            return "every parameter is finite, so the validation itself overflows"
        step = error.step - 1
        shapes = program.config.shapes
        start = find_start(self.workdir)
        position = self.checkpointer.position(start)
        if "" in position:
            return (
                "the first tensor with NaN or Inf was not found, because the batches of a "
                "function that saves no state cannot be read again"
            )
        # A user's batches can only be read forwards, so `self.batches` cannot go back.
        batches = Batches(program.config, self.batches.dataset, program.backend)
        repeated = batches.train(start, error.step, position)
        # With a guard, `state` is still the state before the bad step.
        repeats_steps = state.guard is None
        if repeats_steps:
            # A device may not have the memory for two states.
            for leaf in jax.tree.leaves(state):
                leaf.delete()
            if start:
                state = self.checkpointer.restore(start, program)
            else:
                state = self.first_state(program, self.batches.dataset)
        for count in range(start + 1, error.step):
            batch = next(repeated)
            if repeats_steps:
                train_step, _ = self.steps[shapes.at(count)]
                state, _ = train_step(state, batch)
        batch = next(repeated)
        names = list[str]()
        probe = _make_probe(program.at(shapes.at(error.step)), step, names)
        compiled = program.backend.compile_eval(probe)
        flags = gather_whole(run_alone(compiled, state.params, batch), mesh)
        is_bad = jax.device_get(flags) > 0
        if is_bad.any():
            return f"{names[is_bad.argmax()]} was the first tensor with NaN or Inf"
        return _FINITE


def _make_probe(program: Program, step: int, names: list[str]) -> Callable:
    """Return a function `probe(params, batch, map_sum)` that checks the tensors of a training step.

    `probe` repeats step number `step + 1`, and returns one flag for each tensor, int32
    `[num_tensors]`. A flag above 0 means that the tensor has NaN or Inf. When JAX traces `probe`,
    the list `names` is filled with the tensors' names, in the order in which they are computed.
    """
    # The names of modules, in the order in which the modules return. Every layer is named `h`,
    # because a scan traces only one layer.
    modules = dict[str, None]()

    def report_output(
        next_method: Callable, args: Tree, kwargs: Tree, context: Any
    ) -> Tree:
        output = next_method(*args, **kwargs)
        module = context.module
        if module.path and context.method_name in ("__call__", "parts", "table"):
            path = "/".join(module.path)
            modules[_LAYER.sub("h", path)] = None
            report(module, _BAD_OUTPUT, _is_bad(output))
        return output

    def order(name: str) -> tuple[int, int, int]:
        return _find_order(name, modules)

    def find_flags(params: Params, rows: Batch, device: Any) -> tuple[jax.Array, None]:
        def flags_for(micro_batch: Batch, index: jax.Array) -> jax.Array:
            key = dropout_key(program.config.seed, step, index, device)

            def forward(params: Params) -> tuple[jax.Array, Sums]:
                with nn.intercept_methods(report_output):
                    return program.loss(params, micro_batch, key, step)

            differentiate = jax.value_and_grad(forward, has_aux=True)
            (objective, sums), grads = differentiate(params)
            weights = by_name(params)
            grads = by_name(grads)
            flags = {f"parameter {name}": _is_bad(weights[name]) for name in weights}
            for name in sorted(sums, key=order):
                module, _, kind = name.rpartition("/")
                if kind == _BAD_OUTPUT:
                    flags[f"the output of {module}"] = sums[name][0] > 0
            flags["the loss"] = _is_bad((objective, sums["loss"]))
            # The backward pass computes gradients in the opposite order.
            for name in sorted(grads, key=order, reverse=True):
                flags[f"the gradient of {name}"] = _is_bad(grads[name])
            names[:] = flags
            return jnp.stack(list(flags.values())).astype(jnp.int32)

        number = program.config.train.accumulate_steps
        return accumulate(flags_for, rows, number), None

    def probe(params: Params, batch: Batch, map_sum: MapSum = on_one_device):
        flags, _ = map_sum(find_flags)(params, batch)
        return flags

    return probe


def _find_order(name: str, modules: Collection[str]) -> tuple[int, int, int]:
    """Return a sort key that puts names of tensors in the order of the forward pass.

    `modules` are in the order in which they return, so a module stands after the modules inside it.
    The key consists of the position of the outermost module that contains the tensor, the number of
    the tensor's layer, and the position of the innermost module.
    """
    inside = f"{_LAYER.sub('h', name)}/"
    layer = _LAYER.match(name)
    number = int(layer[1]) if layer else 0
    containing = [
        i for i, module in enumerate(modules) if inside.startswith(f"{module}/")
    ]
    # The head comes last, and is not a module.
    containing = containing or [len(modules)]
    return max(containing), number, min(containing)


def _is_bad(tree: Tree) -> jax.Array:
    is_bad = jnp.bool(False)
    for leaf in jax.tree.leaves(tree):
        is_bad |= ~jnp.isfinite(leaf).all()
    return is_bad
