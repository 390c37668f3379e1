"""Optimizers and learning-rate schedules.

Optimizers that optax contains are used from there. One chain of transformations surrounds them all.
"""

from gpt2.optim.optimizers import OPTIMIZERS, make_optimizer
from gpt2.optim.schedules import SCHEDULES, make_schedule
from gpt2.optim.transforms import averaged_params, joint_norm, num_updates
