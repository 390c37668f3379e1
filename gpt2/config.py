"""A typed, validated view of the ConfigDict: what the rest of the program reads.

The ConfigDict is what people write (`configs/`) and override (`--config.a.b=v`). `Config.from_dict`
turns it into frozen dataclasses with the same names, and refuses what cannot work or would be
ignored, so that no run starts on a mistake.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from gpt2.architecture import DTYPES, REMATS, GPTConfig, ModelConfig
from gpt2.errors import (
    UserError,
    require_at_least,
    require_choice,
    require_fraction,
    unknown_option,
)

SCHEDULES = ("cosine", "linear", "constant", "wsd")
MAX_SEED = 2**32 - 1  # keys are made of 32 bits: beyond, seeds would repeat


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """The `precision.` options."""

    params: str = "float32"
    compute: str = "float32"

    def __post_init__(self):
        require_choice("precision.compute", self.compute, DTYPES)
        if self.params != "float32":
            raise UserError(
                f"precision.params={self.params} cannot hold an optimizer's small updates",
                "Use --config.precision.params=float32, and --config.precision.compute for speed",
            )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The `data.` options."""

    corpus: str = "pystdlib"
    tokenizer: str = "gpt2"
    data_dir: str = ""
    batch_size: int = 480
    val_fraction: float = 0.005
    document_mask: bool = False

    def __post_init__(self):
        require_at_least("data.batch_size", self.batch_size, 1)
        if not 0.0 < self.val_fraction < 1.0:
            raise UserError(
                f"data.val_fraction={self.val_fraction} leaves no training or no validation text",
                "Use a share between 0 and 1, such as --config.data.val_fraction=0.005",
            )


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """The `optim.` options."""

    name: str = "adamw"
    learning_rate: float = 6e-4
    schedule: str = "cosine"
    warmup_steps: int = 2000
    end_learning_rate: float = 6e-5
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def __post_init__(self):
        require_choice("optim.name", self.name, ("adamw",))
        require_choice("optim.schedule", self.schedule, SCHEDULES)
        require_fraction("optim.beta1", self.beta1)
        require_fraction("optim.beta2", self.beta2)
        for name in ("learning_rate", "warmup_steps", "end_learning_rate", "eps", "weight_decay"):
            require_at_least(f"optim.{name}", getattr(self, name), 0)
        require_at_least("optim.clip_norm", self.clip_norm, 0)
        if self.end_learning_rate > self.learning_rate:
            raise UserError(
                f"optim.end_learning_rate={self.end_learning_rate:g} is above "
                f"optim.learning_rate={self.learning_rate:g}",
                "Lower --config.optim.end_learning_rate",
            )
        if self.schedule == "constant" and self.end_learning_rate != self.learning_rate:
            raise UserError(
                f"optim.schedule=constant would ignore "
                f"optim.end_learning_rate={self.end_learning_rate:g}",
                f"Set --config.optim.end_learning_rate={self.learning_rate:g}",
            )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The `train.` options."""

    num_steps: int = 600_000
    accumulate_steps: int = 1
    log_every: int = 10
    eval_every: int = 1000
    eval_batches: int = 0
    checkpoint_every: int = 1000
    keep_checkpoints: int = 1
    init_from: str = ""

    def __post_init__(self):
        for name in ("num_steps", "accumulate_steps", "log_every", "keep_checkpoints"):
            require_at_least(f"train.{name}", getattr(self, name), 1)
        for name in ("eval_every", "eval_batches", "checkpoint_every"):
            require_at_least(f"train.{name}", getattr(self, name), 0)
        prefix = self.init_from.partition(":")[0]
        if self.init_from and prefix not in ("hf", "run"):
            raise UserError(
                f"train.init_from={self.init_from} names no source of weights",
                "Use hf:DIR, run:DIR or run:DIR@STEP",
            )


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """The `parallel.` options."""

    backend: str = "pjit"
    data: int = -1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self):
        require_choice("parallel.backend", self.backend, ("pjit", "pmap"))
        sizes = dict(data=self.data, fsdp=self.fsdp, tensor=self.tensor)
        for name, size in sizes.items():
            if size != -1 and size < 1:
                raise UserError(
                    f"parallel.{name}={size} is no number of devices",
                    f"Use 1 or more, or -1 for the rest, as --config.parallel.{name}=-1",
                )
        rest = [f"parallel.{name}" for name, size in sizes.items() if size == -1]
        if len(rest) > 1:
            raise UserError(
                f"{' and '.join(rest)} are both -1, and only one axis can take the rest",
                f"Give one of them a size, as --config.{rest[-1]}=1",
            )
        if self.backend == "pmap" and (self.fsdp != 1 or self.tensor != 1):
            name = "fsdp" if self.fsdp != 1 else "tensor"
            raise UserError(
                f"parallel.backend=pmap is data parallel only and would ignore "
                f"parallel.{name}={sizes[name]}",
                "Use --config.parallel.backend=pjit",
            )


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
    """The `memory.` options."""

    remat: str = "none"
    scan_layers: bool = False

    def __post_init__(self):
        require_choice("memory.remat", self.remat, REMATS)


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
    """The `logging.` options."""

    tensorboard: bool = True
    wandb: bool = False
    profile_start: int = 0
    profile_steps: int = 0

    def __post_init__(self):
        require_at_least("logging.profile_start", self.profile_start, 0)
        require_at_least("logging.profile_steps", self.profile_steps, 0)
        if self.profile_start and not self.profile_steps:
            raise UserError(
                f"logging.profile_start={self.profile_start} is ignored while "
                "logging.profile_steps=0",
                "Set --config.logging.profile_steps=3, for one",
            )


@dataclasses.dataclass(frozen=True)
class Config:
    """Every option of a run, validated."""

    seed: int
    model: ModelConfig
    precision: PrecisionConfig
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    parallel: ParallelConfig
    memory: MemoryConfig
    logging: LoggingConfig

    def __post_init__(self):
        require_at_least("seed", self.seed, 0)
        if self.seed > MAX_SEED:
            raise UserError(
                f"seed={self.seed} is above {MAX_SEED}", f"Use --config.seed={MAX_SEED}"
            )
        if self.logging.profile_steps and self.logging.profile_start >= self.train.num_steps:
            raise UserError(
                f"logging.profile_start={self.logging.profile_start} is after the last of "
                f"train.num_steps={self.train.num_steps}, which are counted from 0",
                f"Use at most --config.logging.profile_start={self.train.num_steps - 1}",
            )
        batch_size, accumulate_steps = self.data.batch_size, self.train.accumulate_steps
        if batch_size % accumulate_steps:
            raise UserError(
                f"data.batch_size={batch_size} does not split into "
                f"train.accumulate_steps={accumulate_steps} micro-batches",
                "Use --config.data.batch_size="
                f"{max(1, round(batch_size / accumulate_steps)) * accumulate_steps}",
            )

    @classmethod
    def from_dict(cls, tree: Mapping | ConfigDict) -> "Config":
        """Builds the typed view of a ConfigDict or of a config.json.

        Raises:
            UserError: an option is unknown, missing, of the wrong type, or cannot work.
        """
        if isinstance(tree, ConfigDict):
            tree = tree.to_dict()
        return _build(cls, tree, prefix="")

    def to_dict(self) -> dict:
        """Returns nested plain dicts, as config.json holds them."""
        return dataclasses.asdict(self)

    def with_vocabulary(self, tokens: int) -> "Config":
        """Returns the config with `model.vocab_size` as large as the tokenizer's, if it was 0.

        Args:
            tokens: that the tokenizer has; 0: nobody knows yet.

        Raises:
            UserError: the model would have fewer, or nobody knows how many it is to have.
        """
        wanted = self.model.vocab_size
        if not (wanted or tokens):
            raise UserError(
                f"data.tokenizer={self.data.tokenizer} does not say how many tokens it has",
                "Give --config.model.vocab_size",
            )
        if 0 < wanted < tokens:
            raise UserError(
                f"model.vocab_size={wanted} is less than the {tokens} tokens of "
                f"data.tokenizer={self.data.tokenizer}",
                "Use --config.model.vocab_size=0",
            )
        model = dataclasses.replace(self.model, vocab_size=wanted or tokens)
        return dataclasses.replace(self, model=model)

    def gpt(self) -> GPTConfig:
        """Returns the model's configuration; `model.vocab_size` must be resolved (not 0)."""
        return GPTConfig(
            **dataclasses.asdict(self.model),
            param_dtype=self.precision.params,
            compute_dtype=self.precision.compute,
            remat=self.memory.remat,
            scan_layers=self.memory.scan_layers,
        )


def load_config(workdir: Path) -> Config:
    """Reads a run's config.json."""
    path = Path(workdir) / "config.json"
    if not path.is_file():
        raise UserError(f"{workdir} holds no run (no config.json)", "Give a --workdir of train.py")
    try:
        tree = json.loads(path.read_text())
        if "model_type" in tree:
            raise UserError(f"{workdir} is a Hugging Face model, not a run", "Use --hf")
        return Config.from_dict(tree)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path} is not valid JSON ({error})", "Restore it, or train anew"
        ) from None


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Returns the options in which two configs differ: dotted name -> (old, new)."""
    old_flat, new_flat = _flatten(old.to_dict()), _flatten(new.to_dict())
    return {k: (old_flat[k], new_flat[k]) for k in new_flat if old_flat[k] != new_flat[k]}


def _flatten(tree: Mapping, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _build(cls, tree: Mapping, prefix: str):
    fields = {field.name: field.type for field in dataclasses.fields(cls)}
    for name in tree:
        if name not in fields:
            spellings = {prefix + field: prefix + field for field in fields}
            raise unknown_option(prefix + name, spellings, "See configs/default.py")
    values = {}
    for name, kind in fields.items():
        if name not in tree:
            raise UserError(f"the config lacks {prefix}{name}", "Start from configs/default.py")
        value = tree[name]
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, Mapping):
                raise UserError(f"{prefix}{name} is a group of options", "Set one of its members")
            values[name] = _build(kind, value, f"{prefix}{name}.")
            continue
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise UserError(
                f"{prefix}{name}={value!r} is not of type {kind.__name__}",
                f"Give a {kind.__name__} as --config.{prefix}{name}",
            )
        values[name] = value
    return cls(**values)
