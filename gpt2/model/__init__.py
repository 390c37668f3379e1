"""GPT-2 in Flax Linen."""

from gpt2.model.gpt import GPT, GPTConfig, KVCache, num_params

__all__ = ["GPT", "GPTConfig", "KVCache", "num_params"]
