"""GPT-2 in Flax Linen."""

from gpt2.model.attention import resolve_attention
from gpt2.model.gpt import GPT, GPTConfig, KVCache, num_params

__all__ = ["GPT", "GPTConfig", "KVCache", "num_params", "resolve_attention"]
