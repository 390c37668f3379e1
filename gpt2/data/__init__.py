"""Documents -> tokens -> shards -> batch(seed, step)."""

from gpt2.data.dataset import Dataset
from gpt2.data.preparation import prepare

__all__ = ["Dataset", "prepare"]
