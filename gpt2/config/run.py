"""All options of a run: a typed, validated view of the ConfigDict, and its record in config.json.

The ConfigDict is what people write (`configs/`) and override (`--config.a.b=v`). `Config.from_dict`
turns it into frozen dataclasses with the same names.
"""

import dataclasses
import functools
import json
import math
import operator
import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from gpt2.config.model import COMPUTED, GPTConfig, ModelConfig
from gpt2.config.optim import OptimConfig
from gpt2.config.options import DEFAULTS, Options, complete, flatten, require_option
from gpt2.errors import UserError, refuse

# Options that do not decide what the model learns, and may change when a run continues. A name that
# ends in "." or "_" stands for all that begin with it.
_ASIDE = (
    *("parallel.", "memory.", "logging.", "model.attention", "data.data_dir", "train.keep_"),
    *("train.accumulate_steps", "train.log_every", "train.eval_", "train.checkpoint_every"),
    "train.hang_seconds",
)

# The axis of the mesh that a strategy is about.
_STRATEGY_AXIS = {"zero1": "fsdp", "zero3": "fsdp", "megatron": "tensor"}


class PrecisionConfig(Options, group="precision"):
    """The `precision.` options."""


class DataConfig(Options, group="data"):
    """The `data.` options."""

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that hold text: a model that is only scored may be given all of it."""
        return ("train", "validation") if self.val_fraction < 1.0 else ("validation",)


class LossConfig(Options, group="loss"):
    """The `loss.` options."""


class TrainConfig(Options, group="train"):
    """The `train.` options."""

    def validates_at(self, step: int) -> bool:
        """Returns whether the run is validated after a step, counted from 1."""
        return step == self.num_steps or (self.eval_every > 0 and step % self.eval_every == 0)

    def saves_at(self, step: int) -> bool:
        """Returns whether a checkpoint is saved after a step, whatever a validation says."""
        every = self.checkpoint_every
        return step == self.num_steps or (every > 0 and step % every == 0)


class MemoryConfig(Options, group="memory"):
    """The `memory.` options."""


class LoggingConfig(Options, group="logging"):
    """The `logging.` options."""


class RulesConfig(Options, group="parallel.rules"):
    """The `parallel.rules.` options: axis of a parameter -> mesh axes, separated by commas."""

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Returns the axes that have a rule."""
        return tuple(field.name for field in dataclasses.fields(cls))

    def axes(self, name: str) -> tuple[str, ...]:
        """Returns the mesh axes of a rule, outermost first."""
        value = getattr(self, name)
        return () if value == "none" else tuple(value.split(","))


class ParallelConfig(Options, group="parallel"):
    """The `parallel.` options: the sizes of the mesh's axes, and what they split."""

    rules: RulesConfig = RulesConfig()

    @property
    def strategy_axis(self) -> str | None:
        """The mesh axis that the strategy splits something over, or None."""
        return _STRATEGY_AXIS.get(self.strategy)

    @property
    def sizes(self) -> dict[str, int]:
        """The wanted size of every mesh axis; -1: the rest of the devices."""
        sizes = dict(data=self.data, fsdp=self.fsdp, tensor=self.tensor)
        axis = self.strategy_axis
        if axis and sizes[axis] == 1:
            sizes[axis] = -1
            sizes["data"] = 1 if self.data == -1 else self.data
        return sizes

    def __post_init__(self) -> None:
        super().__post_init__()
        data, fsdp, tensor = self.sizes.values()
        refuse(0 in (data, fsdp, tensor), "parallel.data, fsdp and tensor are 1 or more, or -1")
        refuse((data, fsdp, tensor).count(-1) > 1, "only one axis of parallel. can be -1, the rest")
        is_split, whose = (fsdp, tensor) != (1, 1), "is data parallel only, without fsdp or tensor"
        refuse(self.strategy == "ddp" and is_split, f"parallel.strategy=ddp {whose}")
        refuse(self.backend == "pmap" and is_split, f"parallel.backend=pmap {whose}")


class Config(Options, group=""):
    """Every option of a run, validated."""

    model: ModelConfig = ModelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    data: DataConfig = DataConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()
    logging: LoggingConfig = LoggingConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        model, data, train, memory = self.model, self.data, self.train, self.memory
        refuse(data.val_fraction == 1, "data.val_fraction=1 leaves no training text")
        rest, parts = data.batch_size % train.accumulate_steps, train.accumulate_steps
        refuse(rest, f"train.accumulate_steps={parts} does not divide data.batch_size")
        finer = self.precision.logits not in ("float32", self.precision.compute)
        refuse(finer, f"precision.logits={self.precision.logits} is for that compute type alone")
        unsaved = train.keep_every and train.keep_every % (train.checkpoint_every or math.inf)
        refuse(unsaved, "train.keep_every is no multiple of train.checkpoint_every")
        unread = not re.fullmatch("((hf|run):.+)?", train.init_from)
        refuse(unread, f"train.init_from={train.init_from} is not hf:DIR, run:DIR or run:DIR@STEP")
        for name in ("init", "init_std", "zero_init_projections") if train.init_from else ():
            drawn = getattr(model, name) != DEFAULTS.model[name]
            refuse(drawn, f"train.init_from draws no weights, and would ignore model.{name}")
        once, unroll = not memory.scan_layers, memory.scan_unroll
        refuse(once and unroll > 1, "memory.scan_unroll is ignored without memory.scan_layers")
        refuse(model.num_layers % unroll, "memory.scan_unroll does not divide model.num_layers")
        # Compilers keep half of what unrolled layers should move, or more: docs/parallelism.md.
        holds = memory.remat == "offload" and (once or unroll > 1)
        refuse(holds, "memory.remat=offload needs memory.scan_layers=True and scan_unroll=1")
        late = self.logging.profile_steps and self.logging.profile_start >= train.num_steps
        refuse(late, "logging.profile_start is after train.num_steps")

    @property
    def tokens_per_step(self) -> int:
        """Tokens in a global batch."""
        return self.data.batch_size * self.model.context_length

    @property
    def micro_batch_size(self) -> int:
        """Sequences that a forward pass reads, over all devices."""
        return self.data.batch_size // self.train.accumulate_steps

    @classmethod
    def from_dict(cls, tree: Mapping | ConfigDict) -> "Config":
        """Builds the typed view of a ConfigDict or of a config.json; what lacks has its default."""
        options = complete(tree)
        options["parallel"] |= {"rules": RulesConfig(**options["parallel"]["rules"])}
        groups = {name: type(getattr(cls, name)) for name in options if name != "seed"}
        return cls(seed=options["seed"], **{name: groups[name](**options[name]) for name in groups})

    def to_dict(self) -> dict:
        """Returns nested plain dicts, as config.json holds them."""
        return dataclasses.asdict(self)

    def with_vocabulary(self, tokens: int) -> "Config":
        """Returns the config with a `model.vocab_size` of 0 set to the tokenizer's; 0: unknown."""
        size, tokenizer = self.model.vocab_size or tokens, f"data.tokenizer={self.data.tokenizer}"
        refuse(not size, f"{tokenizer} tells no size", "Set --config.model.vocab_size")
        refuse(size < tokens, f"model.vocab_size={size} is less than the {tokens} of {tokenizer}")
        model = dataclasses.replace(self.model, vocab_size=size)
        return dataclasses.replace(self, model=model)

    def gpt(self) -> GPTConfig:
        """Returns the model's configuration; `model.vocab_size` must be resolved (not 0)."""
        computed = {name: option(self, path) for name, path in COMPUTED.items()}
        return GPTConfig(**dataclasses.asdict(self.model), **computed)


def option(config: Config, name: str) -> Any:
    """Returns the value of an option by its dotted name."""
    return functools.reduce(getattr, name.split("."), config)


def with_options(config: Config, options: Mapping[str, Any]) -> Config:
    """Returns the config with some options set, by dotted name."""
    tree = config.to_dict()
    for name, value in options.items():
        require_option(name)
        *groups, member = name.split(".")
        functools.reduce(operator.getitem, groups, tree)[member] = value
    return Config.from_dict(tree)


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Returns the options in which two configs differ: dotted name -> (old, new)."""
    old_flat, new_flat = flatten(old.to_dict()), flatten(new.to_dict())
    return {k: (old_flat[k], new_flat[k]) for k in new_flat if old_flat[k] != new_flat[k]}


def leaves_training(name: str) -> bool:
    """Returns whether an option leaves what the model learns as it is, but for rounding."""
    return any(name.startswith(n) if n.endswith((".", "_")) else name == n for n in _ASIDE)


def is_record(name: str) -> bool:
    """Returns whether a file given as `--config` is the record of a run."""
    return Path(name).suffix == ".json"


def read_options(name: str) -> dict[str, Any]:
    """Returns all options of a config file or of a run's config.json, not yet checked together."""
    path = Path(name)
    refuse(path.suffix not in (".py", ".json"), f"--config={name} is no .py, nor a config.json")
    refuse(not path.is_file(), f"--config={name} is no file", "See configs/ for those there are")
    try:
        if is_record(name):
            tree = json.loads(path.read_text("utf-8"))
            refuse("seed" not in tree, "it does not hold the options of a run")
        else:
            tree = runpy.run_path(name)["get_config"]()
        return complete(tree)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    except Exception as error:  # a config file is code of any kind
        raise UserError(f"{name} cannot be read ({type(error).__name__}: {error})") from error


def load_config(workdir: Path) -> Config:
    """Reads the options of a run from its config.json."""
    path = Path(workdir) / "config.json"
    refuse(not path.is_file(), f"{workdir} holds no run", "Name a workdir of train.py")
    return Config.from_dict(read_options(str(path)))
