"""Why a run diverged: the first tensor that held NaN or Inf, and the micro-batch that it came from.

The steps that train carry nothing for this. The step is run once more, from the newest checkpoint
on, by a program that looks at the output of every module and at every gradient. Its layers are
unrolled, so that a scanned model with dropout draws other masks there.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from gpt2.config import LossConfig
from gpt2.errors import DivergedError, UserError
from gpt2.model import GPT
from gpt2.parallel import gather_whole
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
        return UserError(
            f"{error}: {origin}", f"Lower --config.optim.learning_rate{how}", exit_code=3
        )

    def _find_origin(self, error: DivergedError, state: TrainState) -> str:
        if error.before:
            step, number = error.step - 1, self.program.config.train.accumulate_steps
            if state.guard is None:  # else it is as it was before the step
                state = self._repeat(step, state)
            params, source = state.params, self.batches.train(step, step + 1)
        else:
            step, number, params = None, 1, state.eval_params
            source = self.batches.validation()
        names = list[str]()
        probe = self.program.backend.compile_eval(_make_probe(self.program, step, number, names))
        with source as batches:
            for count, batch in enumerate(batches):
                flags = jax.device_get(
                    gather_whole(probe(params, batch), self.program.backend.mesh)
                )
                for index, row in enumerate(flags, 1 + count):
                    if row.any():
                        where = "micro-batch" if error.before else "batch of the validation split"
                        return f"{names[(row > 0).argmax()]} was the first, in {where} {index}"
        return "run again, all is finite, which points to the hardware or to a sum"

    def _repeat(self, number: int, state: TrainState) -> TrainState:
        """Returns the state after so many steps, by those since a checkpoint."""
        jax.tree.map(lambda leaf: leaf.delete(), state)  # no device may have memory for two
        start, shapes = latest_step(self.workdir) or 0, self.program.state_shapes
        state = self.checkpointer.restore(start, shapes) if start else self.first_state()
        with self.batches.train(start, number) as batches:
            for batch in batches:
                state, _ = self.train_step(state, batch)
        return state


def _make_probe(program: Program, step: int | None, number: int, names: list[str]) -> Callable:
    """Returns `probe(params, batch, map_sum) -> flags`, above 0 for NaN or Inf.

    Flags are int32 [number of micro-batches, tensors], in the order in which they are computed.
    Once it is traced, `names` are theirs. `step` is counted from 0; None: of validation.
    """
    config = program.config
    model = GPT(dataclasses.replace(program.model.config, scan_layers=False))
    options = LossConfig() if step is None else config.loss
    loss, order = next_token_loss(model, options, mutable=["intermediates"]), dict[str, None]()

    def note(next_method: Callable, args: Any, kwargs: Any, context: Any) -> Any:
        output, module = next_method(*args, **kwargs), context.module
        if module.path and context.method_name in ("__call__", "first"):
            order["/".join(module.path)] = None
            module.sow("intermediates", "output", _is_bad(output))
        return output

    def look(params: Any, rows: Batch, device: Any) -> tuple[jax.Array, None]:
        params = in_layout(params, scanned=False)

        def flags_of(micro_batch: Batch, index: jax.Array) -> jax.Array:
            key = None if step is None else dropout_key(config.seed, step, index, device)

            def forward(params: Any) -> tuple[jax.Array, Any]:
                with nn.intercept_methods(note):
                    sums, found = loss(gathered_for(params, micro_batch), micro_batch, key)
                return sums["loss"][0], found["intermediates"]

            (total, found), grads = jax.value_and_grad(forward, has_aux=True)(params)
            weights, found, grads = (flatten_dict(t, sep="/") for t in (params, found, grads))
            ranks = {module: rank for rank, module in enumerate(order)}  # none: it is the head
            # The backward pass goes from last to first.
            last = sorted(grads, key=lambda name: -ranks.get(name.rpartition("/")[0], len(ranks)))
            flags = {f"parameter {name}": _is_bad(weights[name]) for name in weights}
            flags |= {f"the output of {name}": found[f"{name}/output"][0] for name in order}
            flags |= {"the loss": _is_bad(total)}
            flags |= {f"the gradient of {name}": _is_bad(grads[name]) for name in last}
            names[:] = flags
            rows = jnp.arange(number) == index
            return jnp.outer(rows, jnp.stack(list(flags.values()))).astype(jnp.int32)

        return accumulate(flags_of, rows, number), None

    def probe(params: Any, batch: Batch, map_sum: MapSum = on_one_device) -> jax.Array:
        return map_sum(look)(params, batch)[0]

    return probe


def _is_bad(tree: Any) -> jax.Array:
    arrays = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return ~jnp.stack([jnp.isfinite(leaf).all() for leaf in arrays]).all()
