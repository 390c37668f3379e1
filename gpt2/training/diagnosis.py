"""Why a run diverged: the micro-batch and the tensor that first were not finite.

The steps that train carry nothing for this. After one that was not finite, its state is computed
again, and the step is repeated by a program that looks at every tensor.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from gpt2.config import LossConfig
from gpt2.errors import DivergedError, UserError, paths_are_checked
from gpt2.model import GPT
from gpt2.optim.parameters import is_stacked, map_parameters, unrolled_names
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
from gpt2.utils.scan import PROBES
from gpt2.utils.text import counted

_METHODS = ("__call__", "first")  # of modules, in whose arguments and results activations are


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Explains numbers that are not finite.

    Attributes:
        program, batches, workdir, checkpointer: of the run.
        train_step: the program's, compiled.
        first_state: returns the state before the first step.
    """

    program: Program
    batches: Batches
    workdir: Path
    checkpointer: Checkpointer
    train_step: Callable
    first_state: Callable[[], TrainState]

    @contextlib.contextmanager
    def ends_if_diverged(self, state: Callable[[], TrainState]) -> Iterator[None]:
        """Ends all processes if the body fails in this one. Explains a run that diverged.

        Args:
            state: returns the run's newest state.
        """
        with distributed.ends_together(), paths_are_checked():
            try:
                yield
            except DivergedError as error:
                self.checkpointer.wait()
                try:
                    origin = self.find_origin(error, state())
                except Exception as failure:  # of many kinds, such as too little memory
                    about = str(failure).strip().partition("\n")[0]
                    origin = f"where it began is not known ({type(failure).__name__}: {about})"
                raise UserError(f"{error}: {origin}", self._advise(), exit_code=3) from None

    def _advise(self) -> str:
        """Returns how to go on. The newest checkpoint may be finite and spoilt all the same."""
        best, newest = self.checkpointer.best(), latest_step(self.workdir)
        if best:
            good, about = best[0], f"the best checkpoint by validation (loss {best[1]:.4g})"
        elif newest:
            good, about = newest, "the newest checkpoint, which was not validated"
        else:
            return "Lower --config.optim.learning_rate; there is no checkpoint yet"
        return (
            "Start a new run with a lower --config.optim.learning_rate and "
            f"--config.train.init_from=run:{self.workdir}@{good}, {about}"
        )

    def find_origin(self, error: DivergedError, state: TrainState) -> str:
        """Returns the first tensor that was not finite, in words.

        Args:
            error: tells the step.
            state: the run's. It is used up.
        """
        if not error.before:
            return self._find_in_validation(state.eval_params)
        if state.guard is None:  # else it is as it was before the step
            jax.tree.map(lambda leaf: leaf.delete(), state)  # no device may have room for two
            state = self._repeat(error.step)
        with self.batches.train(error.step - 1, error.step) as batches:
            batch = next(batches)
        if name := self._bad_parameter(state.params):
            return f"parameter {name} was not finite before the step"
        number = self.program.config.train.accumulate_steps
        if found := self._compile_look(error.step - 1, number)(state.params, batch):
            index, tensor = found
            where = f"in micro-batch {index + 1} of {number}, " if number > 1 else ""
            return f"{where}the first tensor that is not finite is {tensor}"
        if state.guard is not None:  # whose count of steps went on
            state = state.replace(step=jnp.full_like(state.step, error.step - 1))
        _, metrics = self.train_step(state, batch)
        if all(map(math.isfinite, jax.device_get(metrics).values())):
            return "the same step, repeated, is finite, which points to the hardware"
        return "every tensor of each micro-batch is finite, and their sum is not"

    def _repeat(self, step: int) -> TrainState:
        """Returns the state before a step, counted from 1, by the steps since a checkpoint."""
        start = latest_step(self.workdir) or 0
        state = (
            self.checkpointer.restore(start, self.program.state_shapes)
            if start
            else self.first_state()
        )
        if start < step - 1:
            about = f"repeating {counted(step - 1 - start, 'step')} to find where it began"
            distributed.only_first(print)(about, flush=True)
        with self.batches.train(start, step - 1) as batches:
            for batch in batches:
                state, _ = self.train_step(state, batch)
        return state

    def _find_in_validation(self, params: Any) -> str:
        if name := self._bad_parameter(params):
            return f"parameter {name} is not finite after the step"
        look = self._compile_look()
        with self.batches.validation() as batches:
            for index, batch in enumerate(batches):
                if found := look(params, batch):
                    where = f"in batch {index + 1} of the validation split"
                    return f"{where}, the first tensor that is not finite is {found[1]}"
        return "every tensor is finite, and their sum is not"

    def _bad_parameter(self, params: Any) -> str:
        """Returns the name of the first parameter that is not finite, in the order of use."""
        flags = jax.jit(partial(map_parameters, _bad_by_layer))(params)
        flags = gather_whole(flags, self.program.backend.mesh)
        bad = _bad_names(flags)
        return min(bad, key=self._rank, default="")

    def _compile_look(
        self, step: int | None = None, number: int = 1
    ) -> Callable[[Any, Any], tuple[int, str] | None]:
        """Returns `(params, batch) -> (index, name)` of what is not finite, or None.

        It is the first micro-batch that is not, counted from 0, and its first tensor that is not.

        Args:
            step: of training, counted from 0; None: no gradients.
            number: of micro-batches.
        """
        program = self.program
        probe = program.backend.compile_eval(
            make_probe_step(
                program.model,
                seed=program.config.seed,
                step=step,
                accumulate_steps=number,
                loss=LossConfig() if step is None else program.config.loss,
            )
        )

        def look(params: Any, batch: Any) -> tuple[int, str] | None:
            flags = jax.device_get(gather_whole(probe(params, batch), program.backend.mesh))
            for index in range(number):
                if name := self._first_name(jax.tree.map(lambda leaf, i=index: leaf[i], flags)):
                    return index, name
            return None

        return look

    def _first_name(self, flags: dict[str, Any]) -> str:
        """Returns the first tensor of one micro-batch that is not finite, or an empty text."""
        forward = set(_bad_names(flags["forward"]))
        for module, end in self._order:
            if f"{module}/{end}" in forward:
                return f"the {end} of {module}"
        if flags["loss"]:
            return "the loss"
        bad = _bad_names(flags["gradients"])
        name = max(bad, key=self._rank, default="")  # the backward pass goes from last to first
        return f"the gradient of {name}" if name else ""

    def _rank(self, parameter: str) -> int:
        """Returns where in the order of use a parameter's module stands."""
        key = (parameter.rpartition("/")[0], "output")
        return self._order.index(key) if key in self._order else len(self._order)

    @property
    def _order(self) -> list[tuple[str, str]]:
        return forward_order(self.program.model, self.program.state_shapes.params)


def make_probe_step(
    model: GPT, *, seed: int, step: int | None, accumulate_steps: int, loss: LossConfig
) -> Callable[[Any, Batch, MapSum], dict[str, Any]]:
    """Returns `probe_step(params, batch, map_sum=on_one_device) -> flags`.

    Flags are int32 [accumulate_steps], or [accumulate_steps, L] for stacked layers: above 0 where
    something is not finite. `forward` holds those of the modules' inputs and outputs, by module;
    `loss` that of the loss; `gradients` those of the parameters' gradients.

    Args:
        model, seed, accumulate_steps, loss: as for `gpt2.training.steps.make_update`.
        step: of training, counted from 0; None: no dropout and no gradients.
    """

    def probe_step(params: Any, batch: Batch, map_sum: MapSum = on_one_device) -> dict[str, Any]:
        def count_bad(params, rows, device):
            def look(micro_batch, index):
                def loss_and_flags(params):
                    params = gathered_for(params, micro_batch)
                    key = None if step is None else dropout_key(seed, step, index, device)
                    with nn.intercept_methods(_sow_flags):
                        look_at = next_token_loss(model, loss, mutable=[PROBES])
                        sums, found = look_at(params, micro_batch, key)
                    return sums["loss"][0], found[PROBES]

                grads: Any = {}
                if step is None:
                    total, forward = loss_and_flags(params)
                else:
                    look_back = jax.value_and_grad(loss_and_flags, has_aux=True)
                    (total, forward), grads = look_back(params)
                flags = {
                    "forward": forward,
                    "loss": _is_bad(total),
                    "gradients": map_parameters(_bad_by_layer, grads),
                }
                here = jnp.arange(accumulate_steps) == index
                return jax.tree.map(
                    lambda flag: here.reshape(-1, *[1] * flag.ndim) * flag.astype(jnp.int32), flags
                )

            return accumulate(look, rows, accumulate_steps), None

        return map_sum(count_bad)(params, batch)[0]

    return probe_step


def forward_order(model: GPT, params: Any) -> list[tuple[str, str]]:
    """Returns modules with `input` or `output`, in the order in which the model computes them.

    Args:
        model: of the run.
        params: arrays or shapes.
    """
    paths: dict[tuple[str, ...], None] = {}
    row = jnp.zeros((1, 1), jnp.int32)

    def note(next_method, args, kwargs, context):
        is_probed = _is_probed(context)
        if is_probed:
            paths[(*context.module.path, "input")] = None
        result = next_method(*args, **kwargs)
        if is_probed:
            paths[(*context.module.path, "output")] = None
        return result

    with nn.intercept_methods(note):
        jax.eval_shape(
            next_token_loss(model),
            params,
            {"tokens": row, "targets": row},
        )
    ordered = list(paths)
    if stacked := [path for path in ordered if is_stacked(path)]:
        start = ordered.index(stacked[0])
        layers = [
            (f"h_{layer}", *path[1:])
            for layer in range(model.config.num_layers)
            for path in stacked
        ]
        rest = [path for path in ordered if not is_stacked(path)]
        ordered = [*rest[:start], *layers, *rest[start:]]
    return [("/".join(path[:-1]), path[-1]) for path in ordered]


def _sow_flags(next_method, args, kwargs, context):
    """Notes, beside what a module computes, whether its input and its output are finite."""
    result = next_method(*args, **kwargs)
    if _is_probed(context):
        for end, tree in (("input", (args, kwargs)), ("output", result)):
            flag = _is_bad(tree)
            context.module.sow(
                PROBES, end, flag, init_fn=lambda: None, reduce_fn=lambda _, new: new
            )
    return result


def _is_probed(context: Any) -> bool:
    """Returns whether a call is one whose arguments and result are looked at.

    Each module that is makes one such call in a forward pass, so its path names the tensor. That
    does not hold for dropout, which changes none that is finite.
    """
    module = context.module
    is_inner = bool(module.path) and not isinstance(module, nn.Dropout)
    return is_inner and context.method_name in _METHODS


def _is_bad(tree: Any) -> jax.Array:
    """Returns whether any number of a tree is not finite, a boolean scalar."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    flags = [
        ~jnp.isfinite(leaf).all() for leaf in arrays if jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    return jnp.stack(flags).any() if flags else jnp.bool_(False)


def _bad_by_layer(path: tuple[str, ...], leaf: jax.Array) -> jax.Array:
    """Returns whether a parameter is not finite, for each layer [L] of stacked ones."""
    return ~jnp.isfinite(leaf).all(axis=tuple(range(int(is_stacked(path)), leaf.ndim)))


def _bad_names(flags: Any) -> list[str]:
    """Returns the names, as of unrolled layers, where a tree of flags says so."""
    names: list[str] = []

    def add(path: tuple[str, ...], leaf: Any) -> None:
        each = leaf if is_stacked(path) else [leaf]
        pairs = zip(unrolled_names(path, leaf), each, strict=True)
        names.extend(name for name, flag in pairs if flag)

    map_parameters(add, flags)
    return names
