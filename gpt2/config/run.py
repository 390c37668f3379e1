"""All options of a run, typed and validated, from a ConfigDict or a config.json."""

import json
import math
import re
import runpy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

from ml_collections import ConfigDict

from configs import default
from gpt2.config.model import GPTConfig, ModelConfig
from gpt2.config.options import (
    Options,
    check_effects,
    complete,
    flatten,
    read_factor,
    read_items,
)
from gpt2.config.shapes import ShapeSchedule, StepShape, read_steps
from gpt2.errors import UserError, located
from gpt2.utils import stores
from gpt2.utils.files import reading

# Option of `train.` -> the field of `StepShape` that the option changes during a run.
_SHAPE_SCHEDULES = {
    "batch_schedule": "batch_size",
    "context_schedule": "context_length",
    "window_schedule": "window",
}

DataConfig = default.Data
LossConfig = default.Loss
RulesConfig = default.Rules


@dataclass(frozen=True)
class OptimConfig(default.Optim):
    """The `optim.` options, checked together."""

    def __post_init__(self) -> None:
        _ = self.rates, self.pieces  # parsed now, to raise errors for mistakes in them
        is_free = self.name == "schedule_free"
        if is_free and self.schedule != "constant":
            raise UserError(
                f"optim.name=schedule_free averages weights instead of using "
                f"optim.schedule={self.schedule}",
                "Set optim.schedule=constant",
            )
        if is_free + (self.ema > 0) + (self.tail_average > 0) > 1:
            raise UserError(
                "optim.ema, optim.tail_average and optim.name=schedule_free cannot be combined, "
                "because each averages the weights",
                "Use only one of them",
            )
        if is_free and self.cautious in ("updates", "both"):
            raise UserError(
                f"optim.cautious={self.cautious} needs momentum, which "
                "optim.name=schedule_free does not have. Set optim.cautious to none or decay"
            )
        if is_free and not self.beta1:
            raise UserError(
                "optim.name=schedule_free divides by optim.beta1, which is 0",
                "Set optim.beta1, for example to 0.9",
            )
        if self.adam_learning_rate and not self.learning_rate:
            raise UserError(
                "optim.adam_learning_rate is relative to the schedule of optim.learning_rate=0, so "
                "all rates would be 0",
                "Set optim.learning_rate to a small number instead, such as 1e-12",
            )
        has_decay = self.weight_decay or self.decay_timescale
        decays_apart = has_decay and not self.decay_in_gradient
        changes_decay = self.scheduled_weight_decay or self.cautious in (
            "decay",
            "both",
        )
        if changes_decay and not decays_apart:
            raise UserError(
                "Each of optim.scheduled_weight_decay=True, optim.cautious=decay and "
                "optim.cautious=both needs decoupled weight decay",
                "Set optim.weight_decay above 0, and an optim.name other than adam and sgd",
            )

    @cached_property
    def pieces(self) -> tuple[tuple[int, float], ...]:
        """The pairs (step, fraction of the peak rate) of a `piecewise` schedule, ascending.

        From the step of one pair to the step of the next pair, the learning rate is this fraction
        of its peak. For other schedules, the tuple is empty.
        """
        name, _, text = self.schedule.partition(":")
        if name != "piecewise":
            return ()
        what = f"optim.schedule={self.schedule}"
        pieces = read_steps(what, text, read_factor, "piecewise:1000=0.5,2000=0.1")
        if not pieces:
            raise UserError(
                f"{what} contains no step", "For example, use piecewise:1000=0.5"
            )
        return tuple(pieces.items())

    @cached_property
    def rates(self) -> tuple[tuple[str, float], ...]:
        """The pairs (regular expression, factor) of `layer_rates`, in the given order.

        The first expression that matches a parameter's name determines the factor of its rate.
        """
        text = self.layer_rates
        what = f"optim.layer_rates={text}"
        return tuple(read_items(what, text, _read_rate, "wte=0.5,h_.*=2"))

    @property
    def decay_in_gradient(self) -> bool:
        """Whether the optimizer adds weight decay to the gradient, and not to the update.

        The options `cautious` and `scheduled_weight_decay` then cannot change the decay.
        """
        return self.name in ("adam", "sgd")

    @property
    def averages(self) -> bool:
        """Whether validation and export use the averaged weights of the optimizer's state."""
        return self.name == "schedule_free" or self.ema > 0 or self.tail_average > 0

    @property
    def end_rate(self) -> float:
        """The learning rate at the end of a `cosine`, `linear` or `wsd` schedule."""
        return self.learning_rate * self.end_fraction

    def decay(self, num_steps: int) -> float:
        """Return the weight decay of a run of `num_steps` steps.

        This is `weight_decay`, unless `decay_timescale` is set. It is then 1 divided by the product
        of `learning_rate`, `decay_timescale` and `num_steps`.
        """
        product = self.learning_rate * self.decay_timescale * num_steps
        return 1 / product if product else self.weight_decay

    def tail_start(self, num_steps: int) -> int:
        """Return the step after which the tail average begins in a run of `num_steps` steps.

        Without `tail_average`, return `num_steps`.
        """
        return num_steps - _floor(num_steps * self.tail_average)

    def decay_steps(self, num_steps: int) -> int:
        """Return the number of steps, at least 1, in which the schedule `wsd` lowers the rate.

        `num_steps` is the number of steps of the run.
        """
        return max(_floor(num_steps * self.decay_fraction), 1)


def _read_rate(item: str) -> tuple[str, float]:
    pattern, _, factor = item.rpartition("=")
    re.compile(pattern)
    return pattern, read_factor(factor)


def _floor(number: float) -> int:
    """Round down, with a margin for rounding errors: 0.29 * 100 is 28.999..., and becomes 29."""
    return math.floor(number + 1e-9)


@dataclass(frozen=True)
class TrainConfig(default.Train):
    """The `train.` options."""

    def is_due(self, step: int, every: int) -> bool:
        """Return whether an action is due after `step`: every `every` steps, and at the end.

        If `every` is 0, the action is due only at the end of the run.
        """
        return step == self.num_steps or (every > 0 and step % every == 0)


@dataclass(frozen=True)
class ParallelConfig(default.Parallel):
    """The `parallel.` options: the sizes of the mesh's axes, and what they split."""

    def __post_init__(self) -> None:
        if self.sizes["fsdp"] == self.sizes["tensor"] == 1:
            return
        if self.strategy == "ddp" or self.backend == "pmap":
            raise UserError(
                f"parallel.strategy={self.strategy} with parallel.backend={self.backend} splits "
                "only the batch, and allows no fsdp or tensor axis",
                "Leave out parallel.fsdp and parallel.tensor. With pmap, also leave "
                "parallel.strategy at auto or ddp",
            )

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every mesh axis, from the options `data`, `fsdp`, `tensor` and `strategy`.

        An axis of size -1 uses all remaining devices.
        """
        sizes = dict(data=self.data, fsdp=self.fsdp, tensor=self.tensor)
        takes_all = {"zero1": "fsdp", "zero3": "fsdp", "megatron": "tensor"}
        axis = takes_all.get(self.strategy)
        if axis and sizes[axis] == 1:
            sizes[axis] = -1
            if self.data == -1:
                sizes["data"] = 1
        return sizes


@dataclass(frozen=True)
class Config(default.Options):
    """Every option of a run, checked together."""

    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()

    def __post_init__(self) -> None:
        check_effects(flatten(asdict(self)))
        train = self.train
        if self.data.batch_size % train.accumulate_steps:
            raise UserError(
                f"train.accumulate_steps={train.accumulate_steps} does not divide "
                f"data.batch_size={self.data.batch_size}",
                "Choose a train.accumulate_steps that divides data.batch_size",
            )
        if train.keep_every % (train.checkpoint_every or math.inf):
            raise UserError(
                f"train.keep_every={train.keep_every} is not a multiple of "
                f"train.checkpoint_every={train.checkpoint_every}",
                "Set train.keep_every to such a multiple, or to 0",
            )
        if self.optim.hyperball and self.model.zero_init_projections:
            raise UserError(
                "model.zero_init_projections=True initialises the last matrix of each residual "
                "branch with zeros, and optim.hyperball=True would keep it at zero forever",
                "Set one of the two options to False",
            )
        self._check_shapes()

    def _check_shapes(self) -> None:
        pieces = self.shapes.pieces
        num_steps = self.train.num_steps
        if max(pieces) >= num_steps:
            raise UserError(
                "train.batch_schedule, train.context_schedule or train.window_schedule contains "
                f"step {max(pieces)}, which must be below train.num_steps={num_steps}",
                "Choose an earlier step, or raise train.num_steps",
            )
        for start, shape in pieces.items():
            length = shape.context_length
            done = self.shapes.tokens(start)
            if length < 1 or self.model.context_length % length or done % length:
                raise UserError(
                    f"train.context_schedule has the length {length}, which must be at least 1 and "
                    f"divide both model.context_length and the {done:,} tokens of earlier steps"
                )
        if any(getattr(self.train, name) for name in _SHAPE_SCHEDULES):
            for start, shape in pieces.items():
                with located(f"train.*_schedule at step {start}"):
                    self.at(shape)  # checks the options of this shape

    @cached_property
    def shapes(self) -> ShapeSchedule:
        """The batch size, context length and window of every step of the run."""
        changes: dict[int, dict[str, int]] = {0: {}}
        for name, size in _SHAPE_SCHEDULES.items():
            text = getattr(self.train, name)
            values = read_steps(f"train.{name}={text}", text, int, "0=64,2000=128")
            for start, value in values.items():
                changes.setdefault(start, {})[size] = value
        model = self.model
        shape = StepShape(self.data.batch_size, model.context_length, model.window)
        pieces = {}
        for start in sorted(changes):
            shape = shape._replace(**changes[start])
            pieces[start] = shape
        return ShapeSchedule(pieces)

    def at(self, shape: StepShape) -> "Config":
        """Return the config with the batch size and window of `shape` in every step.

        The result has no schedules of batch size, context length or window. Its
        `model.context_length` does not change, even if `shape.context_length` is shorter.
        """
        options: Options = {f"train.{name}": "" for name in _SHAPE_SCHEDULES}
        options["data.batch_size"] = shape.batch_size
        options["model.window"] = shape.window
        return with_options(self, options)

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens in the largest batch of the run, over all devices and micro-batches."""
        return self.shapes.largest.tokens

    @property
    def micro_batch_size(self) -> int:
        """Number of sequences in one micro-batch, over all devices.

        This is for `data.batch_size`. Steps that train.batch_schedule changes have other
        micro-batches.
        """
        return self.data.batch_size // self.train.accumulate_steps

    @classmethod
    def from_dict(cls, tree: Mapping | ConfigDict) -> Self:
        """Build a config from a ConfigDict or config.json. Missing options have their defaults."""
        return _build(cls, complete(tree))

    def to_dict(self) -> dict:
        """Return the options as nested dicts, for config.json."""
        return asdict(self)

    def with_vocabulary(self, tokens: int) -> "Config":
        """Return the config with a `model.vocab_size` above 0: if it is 0, set it to `tokens`.

        `tokens` is the number of tokens of the tokenizer, or 0 if the number is not known. Raise a
        UserError if the resulting size would be 0 or less than `tokens`.
        """
        size = self.model.vocab_size or tokens
        tokenizer = f"data.tokenizer={self.data.tokenizer}"
        if not size:
            raise UserError(
                f"The vocabulary size of {tokenizer} is not known",
                "Set --config.model.vocab_size",
            )
        if size < tokens:
            raise UserError(
                f"model.vocab_size={size} is less than the {tokens} tokens of {tokenizer}",
                f"Set model.vocab_size to 0, or to at least {tokens}",
            )
        return replace(self, model=replace(self.model, vocab_size=size))

    def gpt(self) -> GPTConfig:
        """Return the model's config, with the attention window of the run's last steps.

        Call `with_vocabulary` first, because `model.vocab_size` must not be 0 here: the size of the
        model depends on it.
        """
        options = asdict(self.model) | {"window": self.shapes.last.window}
        return GPTConfig(
            **options,
            compute_dtype=self.precision.compute,
            logits_dtype=self.precision.logits,
            **asdict(self.memory),
        )


def _build(group: type[Any], options: Options) -> Any:
    """Return an instance of the dataclass `group`, with its nested groups, from nested dicts.

    `options` must contain every option.
    """
    values = dict(options)
    for field in fields(group):
        if is_dataclass(field.default):
            values[field.name] = _build(type(field.default), values[field.name])
    return group(**values)


def get_option(config: Config, name: str) -> Any:
    """Return the value of the option with a dotted name, such as `model.num_layers`."""
    return attrgetter(name)(config)


def with_options(config: Config, options: Mapping[str, object]) -> Config:
    """Return a config in which the values in `options`, by dotted name, replace those in `config`.

    The new config is checked like any other.
    """
    return Config.from_dict(flatten(asdict(config)) | flatten(options))


def find_config(name: str) -> tuple[Path, str]:
    """Return the path and the argument of the config file `name`, which is `FILE[:ARGUMENT]`.

    A file that does not exist in the current directory is looked up in the directory that contains
    the package `gpt2`, so that `configs/quickstart.py` works everywhere.
    """
    path = Path(name)
    argument = ""
    if not path.is_file():
        file, _, argument = name.partition(":")
        path = Path(file)
    if not path.is_file():
        path = Path(__file__).parents[2] / path
    if not path.is_file():
        raise UserError(
            f"There is no config file {name}",
            "Give the path of a file such as configs/quickstart.py",
        )
    return path, argument


def read_options(name: str) -> Options:
    """Return all options of the config file or config.json `name`, nested by group.

    Each option is checked by itself. If `name` is `FILE:ARGUMENT`, the argument is passed to the
    file's `get_config`. See `find_config`.
    """
    path, argument = find_config(name)
    with reading(name, "Correct the file, or restore it from a copy"):
        if path.suffix == ".json":
            tree = json.loads(path.read_text("utf-8"))
            if "seed" not in tree:
                raise UserError(
                    "The file does not contain the options of a run",
                    "Give the config.json in the workdir of a run",
                )
            return complete(tree)
        get_config = runpy.run_path(str(path))["get_config"]
        return complete(get_config(argument) if argument else get_config())


def load_config(workdir: Path) -> Config:
    """Return the options of the run in `workdir`, which is a local folder, from its config.json."""
    path = workdir / "config.json"
    if not path.is_file():
        raise UserError(
            f"{stores.url_or_path(workdir)} does not contain a run",
            "Give the --workdir of an earlier run of train.py",
        )
    return Config.from_dict(read_options(str(path)))
