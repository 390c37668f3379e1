"""GPT-2 in Flax Linen."""

from gpt2.model.cache import KVCache, extend
from gpt2.model.gpt import GPT, GPTConfig, num_params
from gpt2.model.one_device import with_kernels

__all__ = [
    "GPT",
    "GPTConfig",
    "KVCache",
    "extend",
    "num_params",
    "with_kernels",
]
