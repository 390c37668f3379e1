"""Why a run diverged: the first tensor that held NaN or Inf, and the micro-batch that it came from.

The steps that train carry nothing for this. The step is run once more, from the newest checkpoint
on, by a program that looks at the output of every module and at every gradient. Its layers are
unrolled, so that a scanned model with dropout draws other masks there.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from gpt2.config import LossConfig
from gpt2.errors import DivergedError, UserError
from gpt2.model import GPT
from gpt2.parallel import distributed, gather_whole
from gpt2.parallel.rules import gathered_for
from gpt2.training.batches import Batches
from gpt2.training.checkpoint import Checkpointer
from gpt2.training.checkpoint_files import latest_step
from gpt2.training.program import Program
from gpt2.training.state import TrainState
from gpt2.training.steps import Batch, MapSum, next_token_loss, on_one_device
from gpt2.utils.accumulate import accumulate
from gpt2.utils.prng import dropout_key
from gpt2.utils.scan import in_layout


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Explains NaN and Inf. `train_step` is compiled, `first_state` gives that before step 1."""

    program: Program
    batches: Batches
    workdir: Path
    checkpointer: Checkpointer
    train_step: Callable
    first_state: Callable[[], TrainState]

    @contextlib.contextmanager
    def ends_if_diverged(self, state: Callable[[], TrainState]) -> Iterator[None]:
        """Ends all processes if the body fails in this one. Explains a run that diverged."""
        with distributed.ends_together():
            try:
                yield
            except DivergedError as error:
                raise self.explain(error, state()) from None

    def explain(self, error: DivergedError, state: TrainState) -> UserError:
        """Returns what ends the run, with the first tensor that held NaN or Inf."""
        self.checkpointer.wait()
        try:
            origin = self._find_origin(error, state)
        except Exception as failure:  # of many kinds, such as too little memory
            about = str(failure).strip().partition("\n")[0]
            origin = f"where it began is not known ({type(failure).__name__}: {about})"
        best = self.checkpointer.best()  # the newest may be finite and spoilt all the same
        good = best[0] if best else latest_step(self.workdir)
        how = f" and start from --config.train.init_from=run:{self.workdir}@{good}" if good else ""
        how = f"Lower --config.optim.learning_rate{how}"
        return UserError(f"{error}: {origin}", how, exit_code=3)

    def _find_origin(self, error: DivergedError, state: TrainState) -> str:
        if error.before and state.guard is None:  # else it is as it was before the step
            state = self._repeat(error.step, state)
        params, mesh = (
            state.params if error.before else state.eval_params,
            self.program.backend.mesh,
        )
        look = jax.jit(lambda params: jax.tree.map(_is_bad, in_layout(params, scanned=False)))
        flags = flatten_dict(jax.device_get(gather_whole(look(params), mesh)), sep="/")
        if bad := [name for name in flags if flags[name]]:
            return f"parameter {bad[0]} was NaN or Inf {'before' if error.before else 'after'} it"
        step, names = error.step - 1 if error.before else None, list[str]()
        probe = self.program.backend.compile_eval(_make_probe(self.program, step, names))
        examined = self.batches.validation() if step is None else self.batches.train(step, step + 1)
        with examined as batches:
            for count, batch in enumerate(batches, 1):
                found = jax.device_get(gather_whole(probe(params, batch), mesh))
                for index, row in enumerate(found, 1):
                    if row.any():
                        where = f"batch {count}" if step is None else f"micro-batch {index}"
                        return f"in its {where} {names[(row > 0).argmax()]} was the first"
        return "run again, all is finite, which points to the hardware or to a sum"

    def _repeat(self, step: int, state: TrainState) -> TrainState:
        """Returns the state before a step, counted from 1, by the steps since a checkpoint."""
        jax.tree.map(lambda leaf: leaf.delete(), state)  # no device may have memory for two
        start, shapes = latest_step(self.workdir) or 0, self.program.state_shapes
        state = self.checkpointer.restore(start, shapes) if start else self.first_state()
        with self.batches.train(start, step - 1) as batches:
            for batch in batches:
                state, _ = self.train_step(state, batch)
        return state


def _make_probe(program: Program, step: int | None, names: list[str]) -> Callable:
    """Returns `probe(params, batch, map_sum) -> flags`, int32, above 0 for NaN or Inf.

    Flags are [micro-batches, tensors], of tensors in the order in which they are computed, whose
    `names` are known once it is traced. `step` is counted from 0; None: of validation.
    """
    config = program.config
    number, options = config.train.accumulate_steps, config.loss
    if step is None:
        number, options = 1, LossConfig()
    model = GPT(dataclasses.replace(program.model.config, scan_layers=False))
    loss, order = next_token_loss(model, options, mutable=["intermediates"]), dict[str, None]()

    def note(next_method: Callable, args: Any, kwargs: Any, context: Any) -> Any:
        output, module = next_method(*args, **kwargs), context.module
        if module.path and context.method_name in ("__call__", "first"):
            order["/".join(module.path)] = None
            module.sow("intermediates", "output", _is_bad(output))
        return output

    def look(params: Any, rows: Batch, device: Any) -> tuple[jax.Array, None]:
        def flags_of(micro_batch: Batch, index: jax.Array) -> jax.Array:
            key = None if step is None else dropout_key(config.seed, step, index, device)

            def forward(params: Any) -> tuple[jax.Array, Any]:
                with nn.intercept_methods(note):
                    sums, found = loss(gathered_for(params, micro_batch), micro_batch, key)
                return sums["loss"][0], found["intermediates"]

            run = jax.value_and_grad(forward, has_aux=True)
            (total, outputs), grads = run(in_layout(params, scanned=False))
            outputs, grads = flatten_dict(outputs, sep="/"), flatten_dict(grads, sep="/")
            ranks = {module: rank for rank, module in enumerate(order)}  # none: it is the head
            # The backward pass goes from last to first.
            last = sorted(grads, key=lambda name: -ranks.get(name.rpartition("/")[0], len(ranks)))
            names[:] = [f"the output of {module}" for module in order]
            names.extend(["the loss", *(f"the gradient of {name}" for name in last)])
            flags = [outputs[f"{module}/output"][0] for module in order]
            flags += [_is_bad(total), *(_is_bad(grads[name]) for name in last)]
            return jnp.outer(jnp.arange(number) == index, jnp.stack(flags)).astype(jnp.int32)

        return accumulate(flags_of, rows, number), None

    def probe(params: Any, batch: Batch, map_sum: MapSum = on_one_device) -> jax.Array:
        return map_sum(look)(params, batch)[0]

    return probe


def _is_bad(tree: Any) -> jax.Array:
    arrays = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return ~jnp.stack([jnp.isfinite(leaf).all() for leaf in arrays]).all()
