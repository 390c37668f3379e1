"""Cached decoding: append one or more tokens to sequences whose keys and values are stored.

gpt2/model/gpt.py explains the dimension letters.
"""

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
    """The keys and values of all tokens so far, and the last token of each sequence.

    Attributes:
        layers: the model's collection `cache`, which holds the keys and the values of each layer,
            `[B, K, S, H]` in the compute dtype, with room for S tokens. Keys and values are
            separate arrays, and their axis of heads precedes the axis of tokens, so that a step can
            update the arrays in place and multiply them without a transpose.
        length: `[B]` int32, the number of tokens in the cache of each sequence, or S + 1 if there
            was no room for a token.
        last: `[B]` int32, the last token of each sequence; any token if the sequence is empty.
    """

    layers: Tree
    length: Array
    last: Array

    @classmethod
    def create(cls, config: GPTConfig, batch_size: int, max_length: int) -> "KVCache":
        """Return an empty cache for `batch_size` sequences of at most `max_length` tokens.

        Raise a ValueError if `max_length` exceeds the number of learned positions.
        """
        if config.position == "learned" and max_length > config.context_length:
            raise ValueError(
                f"max_length={max_length} exceeds the {config.context_length} learned positions"
            )
        shape = (batch_size, config.kv_heads, max_length, config.head_size)
        layers = {}
        for layer in range(config.num_layers):
            zeros = jnp.zeros(shape, config.compute_dtype)
            pair = {"keys": zeros, "values": jnp.copy(zeros)}
            layers[f"h_{layer}"] = {"attn": pair}
        none = jnp.zeros(batch_size, jnp.int32)
        return cls(in_layout(layers, scanned=config.scan_layers), none, jnp.copy(none))


def extend(
    model: GPT, params: Params, tokens: Array, num_new: Array, cache: KVCache
) -> tuple[Array, KVCache]:
    """Append tokens to cached sequences, and return the logits of the next tokens.

    For example, append a complete prompt first, and then one token at a time.

    Args:
        model: a `GPT`, or an instance of a subclass.
        params: the parameters of the model.
        tokens: `[B, T]` int32, padded on the right.
        num_new: `[B]` int32, the number of tokens in each row that are not padding, at least 1.
        cache: the sequences so far, with room for T more tokens in each.

    Returns:
        The float32 logits `[B, V]` of the token after each sequence, and the extended cache. The
        logits of a sequence whose cache has no room for T more tokens are NaN, in this and all
        later calls.
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
    # Without room, keys and values were overwritten, so there is never room again.
    length = jnp.where(has_room, cache.length + num_new, capacity + 1)
    longer = KVCache(variables["cache"], length, last)
    return jnp.where(has_room[:, None], logits, jnp.nan), longer
