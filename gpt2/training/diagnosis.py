"""Why a run diverged: the first tensor that held NaN or Inf, and the micro-batch that it came from.

The steps that train carry nothing for this. The step is run once more, from the newest checkpoint
on, with its own loss, by a program that looks at what every module gives and at every gradient.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from gpt2.errors import DivergedError, UserError
from gpt2.parallel import gather_whole
from gpt2.parallel.compiled import Steps
from gpt2.parallel.rules import gathered_for
from gpt2.training.batches import Batches
from gpt2.training.checkpoint import Checkpointer
from gpt2.training.checkpoint_files import latest_step
from gpt2.training.program import Program
from gpt2.training.state import TrainState
from gpt2.training.steps import Batch, Sums, evaluation_loss, on_one_device
from gpt2.training.workdir import find_start
from gpt2.utils.accumulate import accumulate
from gpt2.utils.prng import dropout_key
from gpt2.utils.scan import in_layout, report
from gpt2.utils.stores import place_of

_LAYER = re.compile(r"^h_(\d+)")
Params = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Explains NaN and Inf. `steps` are compiled, `first_state` gives that before step 1."""

    program: Program
    batches: Batches
    workdir: Path
    checkpointer: Checkpointer
    steps: Steps
    first_state: Callable[[], TrainState]

    def explain(self, error: DivergedError, state: TrainState) -> UserError:
        """Returns what ends the run, with the first tensor that held NaN or Inf."""
        self.checkpointer.wait()
        try:
            origin = self._find_origin(error, state)
        except Exception as failure:  # of many kinds, such as too little memory
            told = f"{type(failure).__name__}: {failure}"
            origin = f"where it began is not known ({told})"
        # The newest may be finite and spoilt all the same.
        best = self.checkpointer.best()
        good = best[0] if best else latest_step(self.workdir)
        how = "Lower --config.optim.learning_rate"
        if good:
            source = f"run:{place_of(self.workdir)}@{good}"
            how += f" and start from --config.train.init_from={source}"
        return UserError(f"{error}: {origin}", how, exit_code=3)

    def _find_origin(self, error: DivergedError, state: TrainState) -> str:
        program = self.program
        if not error.before:
            held_out, _ = self.batches.validation()
            batches = (batch for _, part in held_out.values() for batch in part)
            return _find_first(program, state.eval_params, batches, None)
        step = error.step - 1
        params = self._params_before(step, state)
        program = program.at(program.config.shapes.at(error.step))
        return _find_first(program, params, self.batches.train(step, step + 1), step)

    def _params_before(self, step: int, state: TrainState) -> Params:
        """Returns the parameters that a bad step began with, by repeating the steps before it."""
        if state.guard is not None:  # the state is as it was before the step
            return state.params
        for leaf in jax.tree.leaves(state):  # no device may hold two
            leaf.delete()
        program = self.program
        start = find_start(self.workdir)
        if start:
            state = self.checkpointer.restore(start, program.state_shapes)
        else:
            state = self.first_state()
        for count, batch in enumerate(self.batches.train(start, step), start + 1):
            train_step, _ = self.steps[program.config.shapes.find(count, batch)]
            state, _ = train_step(state, batch)
        return state.params


def _find_first(
    program: Program, params: Params, batches: Iterable[Batch], step: int | None
) -> str:
    """Names the first bad tensor in batches of a step, or of the validation split without one."""
    where = "batch of the validation split"
    number = 1
    if step is not None:
        where = "micro-batch"
        number = program.config.train.accumulate_steps
    names = list[str]()
    probe = program.backend.compile_eval(_make_probe(program, step, number, names))
    index = 0
    for batch in batches:
        flags = gather_whole(probe(params, batch), program.backend.mesh)
        for row in jax.device_get(flags):
            index += 1
            if row.any():
                name = names[(row > 0).argmax()]
                return f"{name} was the first, in {where} {index}"
    return "run again, all is finite, which points to the hardware or to a sum"


def _make_probe(
    program: Program, step: int | None, number: int, names: list[str]
) -> Callable:
    """Returns `probe(params, batch, map_sum) -> flags` [number of micro-batches, tensors], int32.

    Above 0 is NaN or Inf. Tracing sets `names` of tensors in the order in which they are computed.
    """
    seed = program.config.seed
    loss = evaluation_loss(program.model) if step is None else program.loss
    # In the order in which they end, with `h` for every layer.
    modules = dict[str, None]()

    def note(next_method: Callable, args: Any, kwargs: Any, context: Any) -> Any:
        output = next_method(*args, **kwargs)
        module = context.module
        if module.path and context.method_name in ("__call__", "first"):
            modules[_LAYER.sub("h", "/".join(module.path))] = None
            report(module, "output", _is_bad(output))
        return output

    def place(name: str) -> tuple[int, int, int]:
        inside = f"{_LAYER.sub('h', name)}/"
        at = [i for i, module in enumerate(modules) if inside.startswith(f"{module}/")]
        if not at:
            at = [len(modules)]  # the head, which is no module
        layer = _LAYER.match(name)
        return max(at), int(layer[1]) if layer else 0, min(at)

    def by_name(tree: Params) -> dict[str, jax.Array]:
        return flatten_dict(in_layout(tree, scanned=False), sep="/")

    def look(params: Params, rows: Batch, device: Any) -> tuple[jax.Array, None]:
        def flags_for(micro_batch: Batch, index: jax.Array) -> jax.Array:
            key = None if step is None else dropout_key(seed, step, index, device)

            def forward(params: Params) -> tuple[jax.Array, Sums]:
                with nn.intercept_methods(note):
                    sums = loss(*gathered_for(params, micro_batch), key, step)
                return sums["loss"][0], sums

            (total, sums), grads = jax.value_and_grad(forward, has_aux=True)(params)
            flags = dict[str, jax.Array]()
            for name, leaf in by_name(params).items():
                flags[f"parameter {name}"] = _is_bad(leaf)
            for name in sorted(sums, key=place):
                module, _, kind = name.rpartition("/")
                if kind == "output":
                    flags[f"the output of {module}"] = sums[name][0] > 0
            flags["the loss"] = _is_bad(total)
            grads = by_name(grads)
            # As the backward pass goes.
            for name in sorted(grads, key=place, reverse=True):
                flags[f"the gradient of {name}"] = _is_bad(grads[name])
            names[:] = flags
            found = jnp.stack(list(flags.values()))
            return jnp.outer(jnp.arange(number) == index, found).astype(jnp.int32)

        return accumulate(flags_for, rows, number), None

    return lambda params, batch, map_sum=on_one_device: map_sum(look)(params, batch)[0]


def _is_bad(tree: Any) -> jax.Array:
    """Returns whether an array of a tree holds NaN or Inf."""
    is_bad = jnp.bool(False)
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            is_bad |= ~jnp.isfinite(leaf).all()
    return is_bad
