"""All options of a run: a typed, validated view of a ConfigDict, and config.json."""

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
from gpt2.config.model import COMPUTED, GPTConfig, ModelConfig
from gpt2.config.options import (
    Options,
    changed,
    complete,
    flatten,
    read_factor,
    read_items,
)
from gpt2.config.shapes import Shape, Shapes, read_steps
from gpt2.errors import UserError

# Options of `train.` that change the shape of a step, and what of it.
SCHEDULES = {
    "batch_schedule": "batch_size",
    "context_schedule": "context_length",
    "window_schedule": "window",
}


DataConfig = default.Data
LossConfig = default.Loss


@dataclass(frozen=True)
class OptimConfig(default.Optim):
    """The `optim.` options, checked together."""

    def __post_init__(self) -> None:
        _ = self.rates, self.pieces  # which refuse what they cannot read
        reads = default.OPTIMIZERS[self.name]
        others = set[str]().union(*default.OPTIMIZERS.values()) - {*reads}
        ignored = changed(self) & others
        if ignored:
            told = ", ".join(sorted(ignored))
            raise UserError(f"optim.name={self.name} would ignore optim.{told}")
        for part in ("warmup", "decay"):
            if getattr(self, f"{part}_steps") and getattr(self, f"{part}_percent"):
                raise UserError(
                    f"optim.{part}_steps and {part}_percent are both given", "Set one 0"
                )
        if self.adam_learning_rate and not self.learning_rate:
            raise UserError("optim.adam_learning_rate needs a learning_rate above 0")
        falls = self.schedule in ("cosine", "linear", "wsd")
        if falls and self.learning_rate < self.end_learning_rate:
            raise UserError("the rate would rise to optim.end_learning_rate")
        if self.schedule != "wsd" and (self.decay_steps or self.decay_percent):
            raise UserError("optim.decay_steps and _percent are for wsd")
        is_free = self.name == "schedule_free"
        if is_free and self.schedule != "constant":
            raise UserError("schedule_free wants optim.schedule=constant")
        if is_free + (self.ema > 0) + (self.tail_average > 0) > 1:
            raise UserError(
                "of optim.ema, tail_average and name=schedule_free only one may average"
            )
        if is_free and not self.beta1:
            raise UserError("schedule_free wants an optim.beta1 above 0")
        if is_free and self.cautious in ("updates", "both"):
            raise UserError(f"optim.cautious={self.cautious} needs momentum")
        if self.weight_decay and self.name not in ("adam", "sgd"):
            return
        if self.cautious in ("decay", "both"):
            raise UserError(f"optim.cautious={self.cautious} finds no decay to mask")
        if self.scheduled_weight_decay:
            raise UserError("scheduled_weight_decay finds no decay")

    @cached_property
    def pieces(self) -> tuple[tuple[int, float], ...]:
        """The steps of a `piecewise` schedule, ascending, each with its share of the peak."""
        name, _, text = self.schedule.partition(":")
        if name != "piecewise":
            return ()
        what = f"optim.schedule={self.schedule}"
        pieces = read_steps(what, text, read_factor, "piecewise:1000=0.5,2000=0.1")
        if not pieces:
            raise UserError(f"{what} names no step")
        return tuple(pieces.items())

    @cached_property
    def rates(self) -> tuple[tuple[str, float], ...]:
        """The regular expressions of `layer_rates`, each with its factor."""
        text = self.layer_rates
        what = f"optim.layer_rates={text}"
        return tuple(read_items(what, text, _read_rate, "wte=0.5,h_.*=2"))

    @property
    def averages(self) -> bool:
        """Whether what is validated lies in the optimizer's state: an average of the weights."""
        return self.name == "schedule_free" or self.ema > 0 or self.tail_average > 0

    def tail_start(self, num_steps: int) -> int:
        """Returns the step after which `tail_average` begins in a run of `num_steps`."""
        return num_steps - _floor(num_steps * self.tail_average)

    def warmup(self, num_steps: int) -> int:
        """Returns the steps of the warm-up in a run of `num_steps`."""
        return self.warmup_steps or _floor(num_steps * self.warmup_percent / 100)

    def decay(self, num_steps: int) -> int:
        """Returns the steps over which `wsd` decays in a run of `num_steps`, at least 1."""
        percent = self.decay_percent or 20  # Hu et al. 2024
        return self.decay_steps or max(_floor(num_steps * percent / 100), 1)


def _read_rate(item: str) -> tuple[str, float]:
    pattern, _, factor = item.rpartition("=")
    re.compile(pattern)
    return pattern, read_factor(factor)


def _floor(number: float) -> int:
    """Returns the whole steps of a share of them: 2.3 % of 1,000 are 23, in floats too."""
    return math.floor(number + 1e-9)


@dataclass(frozen=True)
class TrainConfig(default.Train):
    """The `train.` options."""

    def is_due(self, step: int, every: int) -> bool:
        """Returns whether what comes `every` so many steps, and last, comes after a step."""
        return step == self.num_steps or (every > 0 and step % every == 0)


@dataclass(frozen=True)
class RulesConfig(default.Rules):
    """The `parallel.rules.` options: axis of a parameter -> mesh axes, separated by commas."""

    def axes(self, name: str) -> tuple[str, ...]:
        """Returns the mesh axes of a rule, outermost first."""
        value = getattr(self, name)
        return () if value == "none" else tuple(value.split(","))


@dataclass(frozen=True)
class ParallelConfig(default.Parallel):
    """The `parallel.` options: the sizes of the mesh's axes, and what they split."""

    rules: RulesConfig = RulesConfig()

    def __post_init__(self) -> None:
        if self.sizes["fsdp"] == self.sizes["tensor"] == 1:
            return
        if self.strategy == "ddp" or self.backend == "pmap":
            raise UserError(
                "parallel.strategy=ddp and backend=pmap have no fsdp and no tensor"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """The wanted size of every mesh axis; -1: the rest of the devices."""
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
        data = self.data
        train = self.train
        logits = self.precision.logits
        if data.val_fraction == 1:
            raise UserError("data.val_fraction=1 leaves no training text")
        if data.batch_size % train.accumulate_steps:
            raise UserError(
                f"train.accumulate_steps={train.accumulate_steps} does not divide "
                "data.batch_size"
            )
        if logits not in ("float32", self.precision.compute):
            raise UserError(f"precision.logits={logits} is for that compute type alone")
        if train.keep_every % (train.checkpoint_every or math.inf):
            raise UserError("train.keep_every is no multiple of train.checkpoint_every")
        if not re.fullmatch("((hf|run):.+)?", train.init_from):
            raise UserError(
                f"train.init_from={train.init_from} is not hf:DIR, run:DIR or run:DIR@STEP"
            )
        if data.packing != "concat" and train.context_schedule:
            raise UserError(f"data.packing={data.packing} keeps its lengths")
        memory = self.memory
        if memory.scan_unroll > 1 and not memory.scan_layers:
            raise UserError("memory.scan_unroll is ignored without memory.scan_layers")
        if self.model.num_layers % memory.scan_unroll:
            raise UserError("memory.scan_unroll does not divide model.num_layers")
        self._check_shapes()

    def _check_shapes(self) -> None:
        pieces = self.shapes.pieces
        if max(pieces) >= self.train.num_steps:
            raise UserError(f"a schedule names step {max(pieces)}, past the end")
        for start, shape in pieces.items():
            length = shape.context_length
            done = self.shapes.tokens(start)
            if length < 1 or self.model.context_length % length or done % length:
                raise UserError(
                    f"train.context_schedule has {length}, which does not divide "
                    f"model.context_length and the {done:,} tokens of steps before"
                )
        if any(getattr(self.train, name) for name in SCHEDULES):
            for shape in pieces.values():
                self.at(shape)  # which refuses what no run may have

    @cached_property
    def shapes(self) -> Shapes:
        """The shapes of the run's steps."""
        changes: dict[int, dict[str, int]] = {0: {}}
        for name, size in SCHEDULES.items():
            text = getattr(self.train, name)
            values = read_steps(f"train.{name}={text}", text, int, "0=64,2000=128")
            for start, value in values.items():
                changes.setdefault(start, {})[size] = value
        model = self.model
        shape = Shape(self.data.batch_size, model.context_length, model.window)
        pieces = {}
        for start in sorted(changes):
            shape = shape._replace(**changes[start])
            pieces[start] = shape
        return Shapes(pieces)

    def at(self, shape: Shape) -> "Config":
        """Returns the options of a run whose steps all have a shape, but for their context."""
        options: Options = {f"train.{name}": "" for name in SCHEDULES}
        options["data.batch_size"] = shape.batch_size
        options["model.window"] = shape.window
        return with_options(self, options)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in the largest global batch."""
        return self.shapes.largest.tokens

    @property
    def micro_batch_size(self) -> int:
        """Sequences that a forward pass reads, over all devices."""
        return self.data.batch_size // self.train.accumulate_steps

    @classmethod
    def from_dict(cls, tree: Mapping | ConfigDict) -> Self:
        """Builds the typed view of a ConfigDict or of a config.json; what lacks has its default."""
        return _build(cls, complete(tree))

    def to_dict(self) -> dict:
        """Returns nested plain dicts, as config.json holds them."""
        return asdict(self)

    def with_vocabulary(self, tokens: int) -> "Config":
        """Returns the config with a `model.vocab_size` of 0 set to the tokenizer's; 0: unknown."""
        size = self.model.vocab_size or tokens
        tokenizer = f"data.tokenizer={self.data.tokenizer}"
        if not size:
            raise UserError(
                f"{tokenizer} tells no size", "Set --config.model.vocab_size"
            )
        if size < tokens:
            raise UserError(
                f"model.vocab_size={size} is less than the {tokens} of {tokenizer}"
            )
        return replace(self, model=replace(self.model, vocab_size=size))

    def gpt(self) -> GPTConfig:
        """Returns the model as it ends; `model.vocab_size` must be resolved (not 0)."""
        options = asdict(self.model)
        options["window"] = self.shapes.last.window
        for field, name in COMPUTED.items():
            options[field] = option(self, name)
        return GPTConfig(**options)


def _build(group: type[Any], options: Options) -> Any:
    """Returns a group of options, and the groups in it, from nested dicts."""
    values = dict(options)
    for field in fields(group):
        if is_dataclass(field.default):
            values[field.name] = _build(type(field.default), values[field.name])
    return group(**values)


def option(config: Config, name: str) -> Any:
    """Returns the value of an option by its dotted name."""
    return attrgetter(name)(config)


def with_options(config: Config, options: Mapping[str, object]) -> Config:
    """Returns the config with some options set, by dotted name."""
    return Config.from_dict(flatten(config.to_dict()) | flatten(options))


def read_options(name: str) -> Options:
    """Returns all options of a config file or of a run's config.json, not yet checked together.

    `FILE:ARGUMENT` hands the argument to the file's `get_config`. A file that is not in this folder
    may be one that came with the package: `configs/quickstart.py`.
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
            f"--config={name} is no file", "See configs/ for those there are"
        )
    try:
        if path.suffix == ".json":
            tree = json.loads(path.read_text("utf-8"))
            if "seed" not in tree:
                raise UserError("it does not hold the options of a run")
        else:
            get_config = runpy.run_path(str(path))["get_config"]
            tree = get_config(argument) if argument else get_config()
        return complete(tree)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    except Exception as error:  # a config file is code of any kind
        raise UserError(
            f"{name} cannot be read ({type(error).__name__}: {error})"
        ) from error


def load_config(workdir: Path) -> Config:
    """Reads the options of a run from its config.json."""
    path = workdir / "config.json"
    if not path.is_file():
        raise UserError(f"{workdir} holds no run", "Name a workdir of train.py")
    return Config.from_dict(read_options(str(path)))
