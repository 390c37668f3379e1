"""Sample continuations of texts, with a cache of keys and values.

Prompts of different lengths are padded on the right to a common length and processed in a single
pass. Few different lengths are used, so that few programs are compiled. The sampling loop is one
compiled program. It stops when every sequence has ended, when the requested number of tokens is
drawn, or when the longest text fills the context.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from gpt2.errors import UserError
from gpt2.model.cache import KVCache, extend
from gpt2.model.gpt import GPT, Params
from gpt2.model.one_device import with_kernels
from gpt2.parallel.compiled import run_alone
from gpt2.utils.prng import sample_key
from gpt2.utils.scan import in_layout


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The distribution from which the next token is drawn, as a function of the logits.

    Attributes:
        temperature: the number that divides the logits; 0: always the most likely token.
        top_k: sample from the k most likely tokens; 0: from all tokens.
        top_p: sample from the smallest set of most likely tokens whose probabilities sum to at
            least this (Holtzman et al. 2019, section 3.1); 1: from all tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        # In float32, a smaller temperature would make logits overflow, and a smaller top_p could
        # round to 0.
        is_warm = self.temperature == 0 or 1e-6 <= self.temperature < math.inf
        if not is_warm or self.top_k < 0 or not 1e-6 <= self.top_p <= 1:
            given = f"temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}"
            how = (
                "Use a finite temperature that is 0 or at least 1e-6, a top_k of at least 0, and a "
                "top_p from 1e-6 to 1"
            )
            raise UserError(f"{given} is not allowed", how)

    def __call__(self, logits: Array, keys: Array) -> Array:
        """Draw int32 tokens `[B]` from float32 `logits` `[B, V]`, with the random keys `[B]`."""
        chex.assert_rank(logits, 2)
        chex.assert_type(logits, float)
        chex.assert_shape(keys, logits.shape[:1])
        if self.temperature == 0.0:
            return logits.argmax(axis=-1).astype(jnp.int32)
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            largest, _ = jax.lax.top_k(logits, self.top_k)
            smallest = largest[:, -1:]
            logits = jnp.where(logits < smallest, -jnp.inf, logits)
        if self.top_p < 1.0:
            ordered = jnp.sort(logits, axis=-1, descending=True)
            probs = jax.nn.softmax(ordered)
            before = probs.cumsum(axis=-1) - probs
            nucleus = jnp.where(before < self.top_p, ordered, jnp.inf)
            smallest = nucleus.min(axis=-1, keepdims=True)
            logits = jnp.where(logits < smallest, -jnp.inf, logits)
        draw = jax.vmap(jax.random.categorical)
        return draw(keys, logits).astype(jnp.int32)


def bucket(length: int, limit: int) -> int:
    """Return the smallest `32 * 2^i` that is at least `length`, or `limit` if `limit` is smaller.

    Arrays are padded to this length. JAX compiles a program for each different length, so rounding
    lengths up to a few values saves compilations.
    """
    size = 32
    while size < length:
        size *= 2
    return min(size, limit)


def generate(
    model: GPT,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    eot: int | None = None,
    vocab_size: int = 0,
) -> list[list[int]]:
    """Continue each prompt, and return the new tokens of each.

    The random numbers of sequence i depend on `seed` and i, but not on the rest of the batch. When
    a text fills the model's context, sampling continues from the text's last tokens, which fill
    three quarters of the context. Raise a UserError if a prompt is empty.

    Args:
        model: a `GPT`, or an instance of a subclass.
        params: the parameters of the model.
        prompts: the tokens of each prompt, at least one per prompt; lengths may differ.
        max_new_tokens: the largest number of new tokens per prompt.
        sampling: the distribution of the next token.
        seed: the seed of the random numbers.
        eot: the token that ends a sequence, which is not returned; None: no token ends a sequence.
        vocab_size: only token ids below this number are drawn, because larger ids are padding of
            the vocabulary; 0: all token ids of the model may be drawn.
    """
    if not all(len(prompt) for prompt in prompts):
        raise UserError(
            "A prompt is empty",
            "Give a text with --prompt or, in Python, at least one token for each prompt",
        )
    cfg = model.config
    if cfg.scan_layers:  # a scan would copy the cache of all layers for every token
        cfg = dataclasses.replace(cfg, scan_layers=False, scan_unroll=1)
        params = in_layout(params, scanned=False)
    model = with_kernels(model.clone(config=cfg))
    params = jax.tree.map(jnp.asarray, params)
    context = cfg.context_length
    kept = max(1, 3 * context // 4)
    end = -1 if eot is None else eot
    key = sample_key(seed)
    texts = [list(prompt) for prompt in prompts]
    drawn: list[list[int]] = [[] for _ in prompts]
    done = 0
    while done < max_new_tokens and not all(end in row for row in drawn):
        texts = [text if len(text) < context else text[-kept:] for text in texts]
        lengths = np.array([*map(len, texts)], np.int32)
        longest = max(map(len, texts))
        shape = (len(texts), bucket(longest, context))
        tokens = np.zeros(shape, np.int32)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = text
        number = min(max_new_tokens - done, max(1, context - longest))
        draw = partial(
            _generate,
            model=model,
            sampling=sampling,
            cache_length=bucket(longest + number, context),
            vocab_size=vocab_size or cfg.vocab_size,
        )
        new = run_alone(draw, params, tokens, lengths, key, done, number, end)
        for i, row in enumerate(np.asarray(new)):
            texts[i] += row[:number].tolist()
            drawn[i] += row[:number].tolist()
        done += number
    goes_on = lambda token: token != end  # noqa: E731
    return [list(itertools.takewhile(goes_on, row)) for row in drawn]


class _State(struct.PyTreeNode):
    """The state of the sampling loop."""

    step: Array  # int32 scalar, the number of tokens drawn for each sequence
    tokens: Array  # [B, S] int32, the tokens drawn
    ended: Array  # [B] bool
    keys: Array  # [B], a random key for each sequence
    cache: KVCache


@partial(jax.jit, static_argnames=("cache_length", "model", "sampling", "vocab_size"))
def _generate(
    params: Params,
    tokens: Array,
    lengths: Array,
    key: Array,
    done: Array,
    limit: Array,
    end: Array,
    *,
    model: GPT,
    sampling: Sampling,
    cache_length: int,
    vocab_size: int,
) -> Array:
    """Draw up to `limit` tokens after each text, and return them as int32 `[B, S]`.

    S is `cache_length`. `tokens` `[B, T]` holds the padded texts, and `lengths` `[B]` the number of
    tokens in each. Earlier calls drew `done` tokens of each sequence. Once the token `end` has been
    drawn for a sequence, the rest of its row is `end`.
    """
    B = tokens.shape[0]

    def append(state: _State, logits: Array) -> _State:
        fold_in = jax.vmap(jax.random.fold_in, (0, None))
        keys = fold_in(state.keys, done + state.step)
        new = sampling(logits[:, :vocab_size], keys)
        new = jnp.where(state.ended, end, new)
        update = jax.lax.dynamic_update_slice_in_dim
        return state.replace(
            step=state.step + 1,
            tokens=update(state.tokens, new[:, None], state.step, axis=1),
            ended=state.ended | (new == end),
        )

    def body(state: _State) -> _State:
        last = state.tokens[:, state.step - 1]
        one_each = jnp.ones(B, jnp.int32)
        logits, cache = extend(model, params, last[:, None], one_each, state.cache)
        return append(state.replace(cache=cache), logits)

    def unfinished(state: _State) -> Array:
        return (state.step < limit) & ~state.ended.all()

    fold_in = jax.vmap(jax.random.fold_in, (None, 0))
    cache = KVCache.create(model.config, B, cache_length)
    logits, cache = extend(model, params, tokens, lengths, cache)
    state = _State(
        step=jnp.int32(0),
        tokens=jnp.full((B, cache_length), end, jnp.int32),
        ended=jnp.zeros(B, bool),
        keys=fold_in(key, jnp.arange(B)),
        cache=cache,
    )
    state = append(state, logits)
    return jax.lax.while_loop(unfinished, body, state).tokens
