"""Sequences that grow by a token or many at a time, with the keys and values of those before."""

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from gpt2.config import GPTConfig
from gpt2.model.gpt import GPT, Params
from gpt2.utils.scan import in_layout
from gpt2.utils.trees import Tree


class KVCache(struct.PyTreeNode):
    """Keys and values of the tokens so far, and the last tokens.

    Attributes:
        layers: the collection `cache` of a model: keys and values for each layer, `[B, K, S, H]` in
            the compute type. They are separate and heads come first, so that a step writes them in
            place and multiplies them as they are stored.
        length: `[B]` int32, tokens written per sequence.
        last: `[B]` int32, the last token; any where there is none.
    """

    layers: Tree
    length: Array
    last: Array

    @classmethod
    def create(cls, config: GPTConfig, batch_size: int, max_length: int) -> "KVCache":
        """Returns an empty cache for sequences of up to `max_length` tokens."""
        if config.position == "learned" and max_length > config.context_length:
            raise ValueError(f"there are positions for {config.context_length} tokens")
        shape = (batch_size, config.kv_heads, max_length, config.head_size)
        layers = {}
        for layer in range(config.num_layers):
            zeros = jnp.zeros(shape, config.compute_dtype)
            pair = {"keys": zeros, "values": jnp.copy(zeros)}
            layers[f"h_{layer}"] = {"attn": pair}
        none = jnp.zeros(batch_size, jnp.int32)
        return cls(in_layout(layers, scanned=config.scan_layers), none, none)


def extend(
    model: GPT, params: Params, tokens: Array, num_new: Array, cache: KVCache
) -> tuple[Array, KVCache]:
    """Appends tokens to cached sequences: many at once for a prompt, one at a time after.

    Args:
        model: a model, or one of a class of your own.
        params: its weights.
        tokens: [B, T] int32, padded on the right.
        num_new: [B] int32, how many of the T are real, at least 1.
        cache: what came before, with room for T more.

    Returns:
        The logits [B, V] after each sequence's last real token, NaN where there was no room, and
        the longer cache.
    """
    chex.assert_shape([num_new, cache.length], (tokens.shape[0],))
    capacity = jax.tree.leaves(cache.layers)[0].shape[-2]
    has_room = cache.length + tokens.shape[1] <= capacity
    logits, variables = model.apply(
        {"params": params, "cache": cache.layers},
        tokens,
        num_new,
        cache.length,
        cache.last,
        method="newest_logits",
        mutable=["cache"],
    )
    last = jnp.take_along_axis(tokens, (num_new - 1)[:, None], axis=1)[:, 0]
    longer = KVCache(variables["cache"], cache.length + num_new, last)
    return jnp.where(has_room[:, None], logits, jnp.nan), longer
