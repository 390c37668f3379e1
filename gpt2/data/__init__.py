"""Documents -> tokens -> shards -> batch(seed, step)."""

from gpt2.data.dataset import Dataset, prepare

__all__ = ["Dataset", "prepare"]
