"""All options of a run: a typed, validated view of the ConfigDict.

The ConfigDict is what people write (`configs/`) and override (`--config.a.b=v`). `Config.from_dict`
turns it into frozen dataclasses with the same names. It refuses options that cannot work and
options that a run would ignore, so that no run starts with a mistake.
"""

import dataclasses
import math
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from gpt2.config.architecture import GPTConfig, ModelConfig, nearest_divisor
from gpt2.config.choices import DEFAULTS, flatten
from gpt2.config.groups import (
    DataConfig,
    LoggingConfig,
    LossConfig,
    MemoryConfig,
    PrecisionConfig,
    TrainConfig,
)
from gpt2.config.optim import OptimConfig
from gpt2.config.parallel import ParallelConfig
from gpt2.config.record import read_record
from gpt2.errors import UserError, require_at_least, unknown_option

MAX_SEED = 2**32 - 1  # keys hold 32 bits of a seed; larger seeds would repeat
MAX_INT = 2**31 - 1  # of steps and of sizes
_FLOAT32 = np.finfo(np.float32)

# Rows of a vocabulary without a token, at most, or as many as there are tokens: enough to time
# small tokenizers at the size of large ones.
MAX_SPARE_TOKENS = 2**16

# Options that do not decide what the model learns, and may change when a run continues. A name that
# ends in "." or "_" stands for all that begin with it.
_ASIDE = (
    "parallel.",
    "memory.",
    "logging.",
    "model.attention",
    "data.data_dir",
    "train.accumulate_steps",
    "train.log_every",
    "train.eval_",
    "train.checkpoint_every",
    "train.keep_",
    "train.hang_seconds",
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Every option of a run, validated."""

    seed: int
    model: ModelConfig
    precision: PrecisionConfig
    data: DataConfig
    loss: LossConfig
    optim: OptimConfig
    train: TrainConfig
    parallel: ParallelConfig
    memory: MemoryConfig
    logging: LoggingConfig

    def __post_init__(self):
        require_at_least("seed", self.seed, 0)
        if self.logging.profile_steps and self.logging.profile_start >= self.train.num_steps:
            raise UserError(
                f"logging.profile_start={self.logging.profile_start} is after the last of "
                f"train.num_steps={self.train.num_steps}, which are counted from 0",
                f"Use at most --config.logging.profile_start={self.train.num_steps - 1}",
            )
        if self.train.init_from:
            for name in ("init", "init_std", "zero_init_projections"):
                value, unset = getattr(self.model, name), DEFAULTS.model[name]
                if value != unset:
                    raise UserError(
                        f"train.init_from={self.train.init_from} draws no weights, and would "
                        f"ignore model.{name}={value}",
                        f"Use --config.model.{name}={unset}",
                    )
        if "train" not in self.data.splits:
            raise UserError(
                f"data.val_fraction={self.data.val_fraction} leaves no training text",
                "Use a share below 1, such as --config.data.val_fraction=0.005",
            )
        num_layers, unroll = self.model.num_layers, self.memory.scan_unroll
        if num_layers % unroll:
            raise UserError(
                f"memory.scan_unroll={unroll} does not divide model.num_layers={num_layers}",
                f"Use --config.memory.scan_unroll={nearest_divisor(num_layers, unroll)}",
            )
        batch_size, accumulate_steps = self.data.batch_size, self.train.accumulate_steps
        if batch_size % accumulate_steps:
            raise UserError(
                f"data.batch_size={batch_size} does not split into "
                f"train.accumulate_steps={accumulate_steps} micro-batches",
                propose_batch(batch_size, accumulate_steps),
            )

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
            tokens: how many the tokenizer has; 0: not known yet.

        Raises:
            UserError: `model.vocab_size` is less than `tokens` or far more, or neither is known.
        """
        wanted = self.model.vocab_size
        if not (wanted or tokens):
            raise UserError(
                f"data.tokenizer={self.data.tokenizer} does not say how many tokens it has",
                "Give their number, for example --config.model.vocab_size=50257",
            )
        if 0 < wanted < tokens:
            raise UserError(
                f"model.vocab_size={wanted} is less than the {tokens} tokens of "
                f"data.tokenizer={self.data.tokenizer}",
                "Use --config.model.vocab_size=0",
            )
        if tokens and wanted > tokens + max(tokens, MAX_SPARE_TOKENS):
            raise UserError(
                f"model.vocab_size={wanted} has {wanted - tokens} rows that none of the {tokens} "
                f"tokens of data.tokenizer={self.data.tokenizer} uses",
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
            logits_dtype=self.precision.logits,
            remat=self.memory.remat,
            scan_layers=self.memory.scan_layers,
            scan_unroll=self.memory.scan_unroll,
        )


def propose_batch(batch_size: int, accumulate_steps: int, shards: int = 1) -> str:
    """Returns how to make a batch split into micro-batches, and each of these over devices.

    What it proposes first is no larger than what was asked for, where that is possible: a corpus
    or a device may have no room for more.

    Args:
        batch_size: sequences of a batch, which do not split.
        accumulate_steps: micro-batches.
        shards: devices over which each micro-batch is split.
    """
    parts = accumulate_steps * shards
    size = "--config.data.batch_size="
    if batch_size >= parts:
        return f"Use {size}{batch_size // parts * parts}"
    fewer = max(1, batch_size // shards)
    flags = [f"--config.train.accumulate_steps={fewer}"] * (fewer != accumulate_steps)
    flags += [f"{size}{fewer * shards}"] * (fewer * shards != batch_size)
    larger = f", or {size}{parts}" if accumulate_steps > 1 and parts <= MAX_INT else ""
    return f"Use {' '.join(flags)}{larger}"


def load_config(workdir: Path) -> Config:
    """Reads the options of a run from its config.json, as `read_record` does.

    Raises:
        UserError: there is no such file, it is damaged or not that of a run, or its options
            cannot work.
    """
    path = Path(workdir) / "config.json"
    if not path.is_file():
        raise UserError(
            f"{workdir} holds no run (no config.json)", "Name the workdir of a run of train.py"
        )
    return Config.from_dict(read_record(path))


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Returns the options in which two configs differ: dotted name -> (old, new)."""
    old_flat, new_flat = flatten(old.to_dict()), flatten(new.to_dict())
    return {k: (old_flat[k], new_flat[k]) for k in new_flat if old_flat[k] != new_flat[k]}


def leaves_training(name: str) -> bool:
    """Returns whether an option leaves what the model learns as it is, but for rounding."""
    return any(name.startswith(n) if n.endswith((".", "_")) else name == n for n in _ASIDE)


def _build(cls, tree: Mapping, prefix: str):
    fields: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(cls)}
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
        _check_range(prefix + name, value)
        values[name] = value
    return cls(**values)


def _check_range(name: str, value: Any) -> None:
    """Raises a UserError for a number that would be another one where a program computes with it.

    Steps, sizes and rates have 32 bits there. Smaller numbers than the normal ones count as 0.
    """
    default = operator.attrgetter(name)(DEFAULTS)
    how = f"For example, use --config.{name}={default}"
    if type(value) is int and abs(value) > (MAX_SEED if name == "seed" else MAX_INT):
        raise UserError(f"{name}={value} does not fit into 32 bits", how)
    if type(value) is float and math.isfinite(value) and value:
        if abs(value) > float(_FLOAT32.max):
            raise UserError(f"{name}={value} is infinite in 32 bits", how)
        if abs(value) < float(_FLOAT32.tiny):
            raise UserError(f"{name}={value} is 0 in 32 bits", how)
