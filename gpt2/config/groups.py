"""The small groups of options: their types, and the values that each group refuses.

Defaults, meanings and units are in configs/default.py.
"""

import dataclasses

from gpt2.config.choices import DEFAULTS, require_choices
from gpt2.errors import UserError, require_at_least, require_finite, require_fraction


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """The `precision.` options."""

    params: str = DEFAULTS.precision.params
    compute: str = DEFAULTS.precision.compute
    logits: str = DEFAULTS.precision.logits

    def __post_init__(self):
        require_choices("precision", self)
        if self.logits not in ("float32", self.compute):
            raise UserError(
                f"precision.logits={self.logits} is for precision.compute=bfloat16 alone, not "
                f"{self.compute}",
                "Use --config.precision.logits=float32",
            )
        if self.params != "float32":
            raise UserError(
                f"precision.params={self.params} cannot hold an optimizer's small updates",
                "Use --config.precision.params=float32, and --config.precision.compute for speed",
            )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The `data.` options."""

    corpus: str = DEFAULTS.data.corpus
    tokenizer: str = DEFAULTS.data.tokenizer
    data_dir: str = DEFAULTS.data.data_dir
    batch_size: int = DEFAULTS.data.batch_size
    val_fraction: float = DEFAULTS.data.val_fraction
    document_mask: bool = DEFAULTS.data.document_mask

    def __post_init__(self):
        require_at_least("data.batch_size", self.batch_size, 1, example=8)
        if not 0.0 < self.val_fraction <= 1.0:
            raise UserError(
                f"data.val_fraction={self.val_fraction} leaves no training or no validation text",
                "Use a share above 0 and below 1, such as --config.data.val_fraction=0.005",
            )

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that hold text: a model that is only scored may be given all of it."""
        return ("train", "validation") if self.val_fraction < 1.0 else ("validation",)


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The `loss.` options."""

    z_loss: float = DEFAULTS.loss.z_loss
    label_smoothing: float = DEFAULTS.loss.label_smoothing

    def __post_init__(self):
        require_finite("loss.z_loss", self.z_loss, minimum=0.0)
        require_fraction("loss.label_smoothing", self.label_smoothing)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The `train.` options."""

    num_steps: int = DEFAULTS.train.num_steps
    accumulate_steps: int = DEFAULTS.train.accumulate_steps
    log_every: int = DEFAULTS.train.log_every
    eval_every: int = DEFAULTS.train.eval_every
    eval_batches: int = DEFAULTS.train.eval_batches
    checkpoint_every: int = DEFAULTS.train.checkpoint_every
    keep_checkpoints: int = DEFAULTS.train.keep_checkpoints
    keep_every: int = DEFAULTS.train.keep_every
    skip_bad_steps: int = DEFAULTS.train.skip_bad_steps
    skip_outliers: float = DEFAULTS.train.skip_outliers
    hang_seconds: float = DEFAULTS.train.hang_seconds
    init_from: str = DEFAULTS.train.init_from

    def __post_init__(self):
        for name in ("num_steps", "accumulate_steps", "log_every", "keep_checkpoints"):
            require_at_least(f"train.{name}", getattr(self, name), 1)
        whole = ("eval_every", "eval_batches", "checkpoint_every", "keep_every", "skip_bad_steps")
        for name in whole:
            require_at_least(f"train.{name}", getattr(self, name), 0)
        for name in ("skip_outliers", "hang_seconds"):
            require_finite(f"train.{name}", getattr(self, name), minimum=0.0)
        saves_once = not self.checkpoint_every and not self.eval_every
        if saves_once and self.keep_checkpoints != DEFAULTS.train.keep_checkpoints:
            raise UserError(
                f"train.keep_checkpoints={self.keep_checkpoints} is ignored while "
                "train.checkpoint_every=0 and train.eval_every=0 save the end alone",
                f"Use --config.train.keep_checkpoints={DEFAULTS.train.keep_checkpoints}, or give "
                "--config.train.checkpoint_every",
            )
        every = self.checkpoint_every
        if self.keep_every and (not every or self.keep_every % every):
            multiple = max(1, self.keep_every // every) * every if every else 0
            raise UserError(
                f"train.keep_every={self.keep_every} is no multiple of "
                f"train.checkpoint_every={every}, so that such steps are not saved",
                f"Use --config.train.keep_every={multiple}",
            )
        prefix, _, place = self.init_from.partition(":")
        if self.init_from and (prefix not in ("hf", "run") or not place or place.endswith("@")):
            raise UserError(
                f"train.init_from={self.init_from} names no source of weights",
                "Use hf:DIR, run:DIR, run:DIR@latest or run:DIR@STEP",
            )


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
    """The `memory.` options."""

    remat: str = DEFAULTS.memory.remat
    scan_layers: bool = DEFAULTS.memory.scan_layers
    scan_unroll: int = DEFAULTS.memory.scan_unroll

    def __post_init__(self):
        require_choices("memory", self)
        require_at_least("memory.scan_unroll", self.scan_unroll, 1)
        if self.scan_unroll > 1 and not self.scan_layers:
            raise UserError(
                f"memory.scan_unroll={self.scan_unroll} is ignored while memory.scan_layers=False",
                "Use --config.memory.scan_layers=True, or --config.memory.scan_unroll=1",
            )
        if self.remat == "offload" and not self.scan_layers:
            # Compilers keep half of what unrolled layers should move, or more: docs/parallelism.md.
            raise UserError(
                "memory.remat=offload frees a device only where layers are scanned",
                "Use --config.memory.scan_layers=True, or --config.memory.remat=dots",
            )
        if self.remat == "offload" and self.scan_unroll > 1:
            raise UserError(
                "memory.remat=offload is known to free a device only with one layer in a turn of "
                f"the loop, not memory.scan_unroll={self.scan_unroll}",
                "Use --config.memory.scan_unroll=1, or --config.memory.remat=dots",
            )


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
    """The `logging.` options."""

    tensorboard: bool = DEFAULTS.logging.tensorboard
    wandb: bool = DEFAULTS.logging.wandb
    watch_every: int = DEFAULTS.logging.watch_every
    profile_start: int = DEFAULTS.logging.profile_start
    profile_steps: int = DEFAULTS.logging.profile_steps

    def __post_init__(self):
        require_at_least("logging.watch_every", self.watch_every, 0)
        require_at_least("logging.profile_start", self.profile_start, 0)
        require_at_least("logging.profile_steps", self.profile_steps, 0)
        if self.profile_start and not self.profile_steps:
            raise UserError(
                f"logging.profile_start={self.profile_start} is ignored while "
                "logging.profile_steps=0",
                "For example, use --config.logging.profile_steps=3",
            )
