"""Documents -> tokens -> shards -> batch(seed, step)."""

from gpt2.data.corpus import Dataset
from gpt2.data.datasets import prepare

__all__ = ["Dataset", "prepare"]
