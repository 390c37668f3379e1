"""A run's program, built once from its options and its devices.

train.py, and the tools that plan and measure training, get the model, loss, optimizer, backend and
steps from a `Program`. Building it draws no weights and runs no steps. If the model uses a
library's attention kernel (cuDNN, splash or tokamax), building the program runs a check of this
kernel on the devices (gpt2/parallel/kernel_check.py).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import Array

from gpt2.config import Config
from gpt2.config.shapes import StepShape
from gpt2.errors import UserError
from gpt2.model import GPT, num_params
from gpt2.model.flops import model_flops_per_token
from gpt2.model.ingredients import score_term_options
from gpt2.ops import Ops
from gpt2.optim import joint_norm, make_optimizer, make_schedule
from gpt2.parallel import Backend, make_backend
from gpt2.parallel.compiled import CompiledStep, CompiledSteps, compile_once
from gpt2.parallel.kernel_check import check_attention
from gpt2.parallel.kernels import choose_attention
from gpt2.parallel.mesh import check_layout
from gpt2.parallel.shards import isolate
from gpt2.parallel.state_sharding import with_shardings
from gpt2.telemetry.chips import find_chip
from gpt2.training.batches import Batches
from gpt2.training.losses import LossFn, evaluation_loss, next_token_loss
from gpt2.training.state import TrainState
from gpt2.training.statistics import make_watch_step
from gpt2.training.steps import (
    make_eval_step,
    make_train_step,
    make_update,
    select_both,
)
from gpt2.utils.platform import platform_of
from gpt2.utils.prng import init_key
from gpt2.utils.remat import compiler_options
from gpt2.utils.text import format_bytes, format_count
from gpt2.utils.trees import Tree


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The computation of a run, and its layout on devices.

    In the config, `model.vocab_size` must not be 0, because it determines the shapes of parameters;
    `Config.with_vocabulary` sets it. The optimizer is an optax chain that contains the schedule.
    The steps are pure functions: see `gpt2.training.steps` and `statistics`.
    """

    config: Config
    model: GPT
    loss: LossFn
    optimizer: optax.GradientTransformation
    backend: Backend
    train_step: Callable
    watch_step: Callable
    eval_step: Callable
    # Builds a program for another config, with the same devices, model, loss, schedule and
    # optimizer.
    with_config: Callable[[Config], "Program"]
    # How attention's kernel failed in `check_attention`; empty if it did not fail.
    kernel_fault: str

    @classmethod
    def from_config(
        cls,
        config: Config,
        devices: Sequence[jax.Device],
        *,
        model: type[GPT] = GPT,
        loss: Callable = next_token_loss,
        schedule: Callable = make_schedule,
        optimizer: Callable = make_optimizer,
    ) -> "Program":
        """Build the program of a config on `devices`. `model.vocab_size` must not be 0.

        `model`, `loss`, `schedule` and `optimizer` build the parts of the program that have these
        names. `schedule` builds the learning rate as a function of the step.
        """
        check_layout(config, len(devices))
        gpt_config = config.gpt()
        terms = score_term_options(gpt_config)
        gpt_config, kernel_fault = check_attention(
            gpt_config, devices[0], terms, is_masked=config.data.document_mask
        )
        gpt = model(gpt_config)
        shapes = jax.eval_shape(partial(draw_params, gpt), jax.random.key(0))
        backend = make_backend(
            config.parallel,
            gpt.logical_axes(),
            list(devices),
            gather_by=choose_gather(config, devices, num_params(shapes)),
        )
        if config.logging.noise_scale:
            _check_micro_batches(config, backend)
        gpt = gpt.clone(ops=backend.make_ops(gpt.config, terms))
        num_steps = config.train.num_steps
        rates = schedule(config.optim, num_steps)
        chain = optimizer(
            config.optim,
            rates,
            gpt.parameters(),
            num_steps=num_steps,
            width_ratio=gpt.config.width_ratio,
            matrices=backend.matrices,
        )
        train_loss = loss(gpt, config.loss)
        if backend.gather_by == "layer":
            train_loss = isolate(train_loss)
        platform = platform_of(devices[0])
        is_one_gpu = backend.mesh.size == 1 and platform == "gpu"
        update = make_update(
            train_loss,
            chain,
            rates,
            seed=config.seed,
            accumulate_steps=config.train.accumulate_steps,
            measures_noise=config.logging.noise_scale,
            norm=joint_norm if is_one_gpu else optax.tree.norm,
            choose=jax.lax.cond if platform == "cpu" else select_both,
        )
        # The validation loss is always cross-entropy. If the user has another loss, validation also
        # reports the quantities that this loss returns.
        others = None if loss is next_token_loss else train_loss
        return cls(
            config=config,
            model=gpt,
            loss=train_loss,
            optimizer=chain,
            backend=backend,
            train_step=make_train_step(update),
            watch_step=make_watch_step(update),
            eval_step=make_eval_step(evaluation_loss(gpt, others)),
            with_config=partial(
                cls.from_config,
                devices=devices,
                model=model,
                loss=loss,
                schedule=schedule,
                optimizer=optimizer,
            ),
            kernel_fault=kernel_fault,
        )

    def init(self, key: Array) -> TrainState:
        """Return the state before the first step, as a pure function of a key."""
        model = self.model.clone(ops=Ops())  # whose trace `from_config` has stored
        return self._first_state(draw_params(model, key))

    def _first_state(self, params: Tree) -> TrainState:
        compute = self.config.precision.compute
        skip_bad_steps = self.config.train.skip_bad_steps
        return TrainState.create(params, self.optimizer, compute, skip_bad_steps)

    def init_state(self, params: Tree = None) -> TrainState:
        """Return the state before the first step, on the devices.

        With pjit, each device draws only its own part of the parameters. If `params` are given, as
        arrays in host memory, they replace the drawn parameters.
        """
        if params is None:
            return self.backend.init_state(self.init, init_key(self.config.seed))
        shardings = self.backend.state_shardings(self.state_shapes).params
        return self.backend.init_state(
            self._first_state, jax.device_put(params, shardings)
        )

    @functools.cached_property
    def state_shapes(self) -> TrainState:
        """Shapes, dtypes and shardings of the state."""
        shapes = jax.eval_shape(self.init, jax.random.key(0))
        return with_shardings(shapes, self.backend.state_shardings(shapes))

    @property
    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of the largest batch."""
        size, length, _ = self.config.shapes.largest
        whole = jax.ShapeDtypeStruct(
            self.backend.batch_shape(size, length),
            jnp.int32,
            sharding=self.backend.batch_sharding,
        )
        names = ["tokens", "targets"]
        if self.config.data.document_mask:
            names.append("segments")
        return dict.fromkeys(names, whole)

    @property
    def num_params(self) -> int:
        """The number of parameters."""
        return num_params(self.state_shapes.params)

    def flops_per_token(self, shape: StepShape) -> float:
        """Return the training FLOPs per token of steps with the given context length and window."""
        return model_flops_per_token(self.model.config, shape)

    @property
    def _device(self) -> jax.Device:
        """The first device. All devices are of one kind."""
        return self.backend.mesh.devices.flat[0]

    @property
    def attention(self) -> str:
        """The implementation of attention, as the first lines of a run print it."""
        cfg = self.model.config
        name, why = choose_attention(cfg, self._device, score_term_options(cfg))
        if why := self.kernel_fault or why:
            return f"by the reference implementation: {why}"
        if self.config.model.dropout and name != "plain":
            return f"by {name} (with dropout, by the reference implementation)"
        return "by the reference implementation" if name == "plain" else f"by {name}"

    def _describe_optimizer(self) -> str:
        optim = self.config.optim
        num_steps = self.config.train.num_steps
        per_step = optim.learning_rate * optim.decay(num_steps)
        if not per_step or optim.decay_in_gradient:
            return optim.name
        decay = f"weight decay {optim.decay(num_steps):.3g}"
        return f"{optim.name}, {decay} (timescale {1 / per_step:,.0f} steps)"

    def describe(self, batches: Batches, steps: CompiledSteps, start: int) -> str:
        """Return the first lines that the run prints: facts about its options, data and devices."""
        num_steps = self.config.train.num_steps
        compiled = [step for pair in steps.values() for step in pair if step]
        first = self.config.shapes.at(start + 1).tokens
        last = self.config.shapes.last.tokens
        sizes = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        peak = format_bytes(max(each.peak_bytes for each in compiled))
        seconds = max(each.compile_seconds for each in compiled)
        devices = f"{self.backend.mesh.size} ({self._device.device_kind})"
        rows = {
            "model": f"{format_count(self.num_params)} parameters, attention {self.attention}",
            "data": batches.describe(num_steps),
            "optim": self._describe_optimizer(),
            "devices": f"{devices}, {self.backend.layout}",
            "steps": f"{start + 1} to {num_steps}, each of {sizes} tokens; {peak} of memory per "
            f"device; compiled in {seconds:.0f} s",
        }
        if self.config.optim.warmup_steps >= num_steps:
            rows["warning"] = (
                f"the learning rate only rises, because optim.warmup_steps="
                f"{self.config.optim.warmup_steps} is not less than train.num_steps={num_steps}"
            )
        return "\n".join(f"{name:<8} {text}" for name, text in rows.items()) + "\n"

    def at(self, shape: StepShape) -> "Program":
        """Return the program for steps of the given shape.

        Its model has the attention window of `shape`. If this program has the same window, return
        this program.
        """
        same = shape.window == self.model.config.window
        return self if same else self.with_config(self.config.at(shape))

    def compile_steps(
        self, state: TrainState, examples: Mapping[StepShape, Tree]
    ) -> CompiledSteps:
        """Compile the train step and, with `logging.watch_every`, the norm-logging step.

        `examples` maps each shape to a batch. The result maps each shape to the two compiled steps;
        the second is None without `logging.watch_every`.
        """
        steps = CompiledSteps()
        for shape, batch in examples.items():
            program = self.at(shape)
            train_step = program.compile_train(state, batch)
            watch_step = None
            if self.config.logging.watch_every:
                watch_step = program.compile_watch(state, batch)
            steps[shape] = train_step, watch_step
        return steps

    def compile_train(self, state: TrainState, batch: Tree) -> CompiledStep:
        """Compile the train step, `(state, batch) -> (state, metrics)`.

        The compiled step donates the memory of the old state. Both arguments of this method may be
        shapes, such as `state_shapes`, unless pmap runs in several processes.
        """
        return self.compile(self.backend.compile_train(self.train_step), state, batch)

    def compile(self, step: Tree, state: Tree, batch: Tree) -> CompiledStep:
        """Compile `step(state, batch)`, a function that jax.jit or jax.pmap has returned.

        XLA's options depend on the model's rematerialisation and the platform; see
        `gpt2.utils.remat.compiler_options`.
        """
        cfg = self.model.config
        options = compiler_options(
            cfg.remat,
            looped=cfg.loops_over_layers,
            platform=platform_of(self._device),
        )
        return compile_once(step, state, batch, options=options)

    def compile_watch(self, state: TrainState, batch: Tree) -> CompiledStep:
        """Compile the norm-logging step, `(state, batch) -> norms`."""
        return self.compile(self.backend.compile_watch(self.watch_step), state, batch)

    def compile_eval(self, params: Tree, batch: Tree) -> CompiledStep:
        """Compile the validation step, `(params, batch) -> {name: (sum, count)}`."""
        return compile_once(self.backend.compile_eval(self.eval_step), params, batch)


@partial(jax.jit, static_argnums=0, inline=True)  # so that equal models share one trace
def draw_params(model: GPT, key: Array) -> Tree:
    """Return parameters drawn from a key."""
    return model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]


def _check_micro_batches(config: Config, backend: Backend) -> None:
    """Raise a UserError if a training step cannot measure the gradient noise scale.

    To measure it, a step must have two or more micro-batches, over all devices, and must compute
    the whole gradient of each.
    """
    if backend.num_shards * config.train.accumulate_steps == 1:
        raise UserError(
            "logging.noise_scale=True compares the gradients of micro-batches, but a step has only "
            "one micro-batch",
            "Set train.accumulate_steps to 2 or more, or use several devices",
        )
    if backend.gather_by == "layer":
        raise UserError(
            "logging.noise_scale=True needs the whole gradient of each micro-batch, but devices "
            "gather parameters by layer",
            "Set parallel.fsdp_gather=step",
        )


def choose_gather(
    config: Config, devices: Sequence[jax.Device], num_params: int
) -> str:
    """Choose `layer` or `step` for `parallel.fsdp_gather=auto`: when devices gather parameters.

    `num_params` is the number of the model's parameters.
    """
    # Gathering by layer needs less memory. With one micro-batch and 16-bit compute, it sends no
    # more bytes than gathering by step: two gathers in 16 bits instead of one gather in 32 bits.
    if config.train.accumulate_steps == 1 and config.precision.compute != "float32":
        return "layer"
    # Otherwise, gathering by step sends fewer bytes, but stores whole parameters and gradients: 8
    # bytes for each parameter.
    chip = find_chip(devices[0].device_kind)
    if chip and 0 < 0.5e9 * chip.memory < 8 * num_params:
        return "layer"
    return "step"
