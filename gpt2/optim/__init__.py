"""Optimizers and learning-rate schedules: optax's where it has them, and one chain for all."""

from gpt2.optim.averages import averaged_params
from gpt2.optim.optimizers import OPTIMIZERS, check_layer_rates, make_optimizer, num_updates
from gpt2.optim.schedules import SCHEDULES, make_schedule
from gpt2.optim.transforms import global_norm

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "averaged_params",
    "check_layer_rates",
    "global_norm",
    "make_optimizer",
    "make_schedule",
    "num_updates",
]
