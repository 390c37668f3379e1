"""Options: a typed, validated view of the ConfigDict that configs/ and the command line give."""

from gpt2.config.model import SIZES, GPTConfig, ModelConfig
from gpt2.config.optim import OptimConfig
from gpt2.config.options import CHOICES, DEFAULTS, MAX_SEED, flatten, read_option
from gpt2.config.run import (
    Config,
    DataConfig,
    LoggingConfig,
    LossConfig,
    MemoryConfig,
    ParallelConfig,
    PrecisionConfig,
    RulesConfig,
    TrainConfig,
    differences,
    leaves_training,
    load_config,
    option,
    read_options,
    with_options,
)
