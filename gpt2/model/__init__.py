"""GPT-2 in Flax Linen."""

from gpt2.model.attention import Cache
from gpt2.model.gpt import GPT, GPTConfig, KVCache, num_params
from gpt2.model.kernels import with_kernels

__all__ = ["GPT", "Cache", "GPTConfig", "KVCache", "num_params", "with_kernels"]
