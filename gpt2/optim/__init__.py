"""Optimizers and learning-rate schedules, from optax where it has them."""

from gpt2.optim.optimizers import OPTIMIZERS, make_optimizer
from gpt2.optim.schedules import SCHEDULES, make_schedule
from gpt2.optim.transforms import averaged_params, joint_norm, num_updates
