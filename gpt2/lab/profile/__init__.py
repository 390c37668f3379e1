"""From a profile to a cause: traces a few steps, and says where their time goes."""

from gpt2.lab.profile.profiler import Profiler

__all__ = ["Profiler"]
