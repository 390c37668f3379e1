"""The typed, validated options of a run, from a config file and the command line."""

from configs.default import Logging as LoggingConfig
from configs.default import Memory as MemoryConfig
from gpt2.config.model import SIZES, GPTConfig, ModelConfig
from gpt2.config.options import DEFAULTS, flatten, read_option
from gpt2.config.run import (
    Config,
    DataConfig,
    LossConfig,
    OptimConfig,
    ParallelConfig,
    RulesConfig,
    TrainConfig,
    get_option,
    load_config,
    read_options,
    with_options,
)
