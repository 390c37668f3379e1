"""Options: a typed, validated view of the ConfigDict that configs/ and the command line give."""

from gpt2.config.architecture import SIZES, GPTConfig, ModelConfig
from gpt2.config.choices import CHOICES, DEFAULTS, flatten
from gpt2.config.files import check_config_file, is_record, read_config_file
from gpt2.config.groups import (
    DataConfig,
    LoggingConfig,
    LossConfig,
    MemoryConfig,
    PrecisionConfig,
    TrainConfig,
)
from gpt2.config.optim import OptimConfig
from gpt2.config.overrides import ALIASES, option, read_option, with_options
from gpt2.config.parallel import ParallelConfig, RulesConfig
from gpt2.config.record import complete_record, holds_run, read_record
from gpt2.config.run import (
    MAX_INT,
    MAX_SEED,
    Config,
    differences,
    leaves_training,
    load_config,
    propose_batch,
)

__all__ = [
    "ALIASES",
    "CHOICES",
    "DEFAULTS",
    "MAX_INT",
    "MAX_SEED",
    "SIZES",
    "Config",
    "DataConfig",
    "GPTConfig",
    "LoggingConfig",
    "LossConfig",
    "MemoryConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RulesConfig",
    "TrainConfig",
    "check_config_file",
    "complete_record",
    "differences",
    "flatten",
    "holds_run",
    "is_record",
    "leaves_training",
    "load_config",
    "option",
    "propose_batch",
    "read_config_file",
    "read_option",
    "read_record",
    "with_options",
]
