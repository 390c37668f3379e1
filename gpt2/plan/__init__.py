"""Plans of runs that do not run: what a step takes, by compilers, and which layouts fit."""

from gpt2.plan.command import define_flags, is_asked, run
from gpt2.plan.drawing import visualize

__all__ = ["define_flags", "is_asked", "run", "visualize"]
