"""Continues texts, with a cache of keys and values.

    python -m gpt2.generate --workdir=DIR --prompt=TEXT

Prompts of any lengths are padded on the right to one of a few lengths and read in one pass. The
loop that samples is one compiled program, which stops when every sequence has ended.
"""

from gpt2.errors import UserError
from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import struct

from gpt2 import cli
from gpt2.data.tokenizer import Tokenizer
from gpt2.hf.weights import load_model
from gpt2.model import GPT, GPTConfig, KVCache
from gpt2.utils.files import write_text
from gpt2.utils.prng import sample_key
from gpt2.utils.scan import in_layout


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from the logits.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw among the k most likely tokens; 0: all.
        top_p: draw among the most likely tokens that together reach this probability (Holtzman et
            al. 2019, section 3.1); 1: all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        fine = (
            0 <= self.temperature < math.inf and self.top_k >= 0 and 0 < self.top_p <= 1
        )
        if not fine:
            raise UserError(f"{self} draws no token")

    def __call__(self, logits: jax.Array, keys: jax.Array) -> jax.Array:
        """Draws tokens [B] int32 from `logits` [B, V] float32 with `keys` [B]."""
        chex.assert_rank(logits, 2)
        chex.assert_type(logits, float)
        chex.assert_shape(keys, logits.shape[:1])
        if self.temperature == 0.0:
            return logits.argmax(axis=-1).astype(jnp.int32)
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            smallest = jax.lax.top_k(logits, self.top_k)[0][:, -1:]
            logits = jnp.where(logits < smallest, -jnp.inf, logits)
        if self.top_p < 1.0:
            ordered = jnp.sort(logits, axis=-1, descending=True)
            probs = jax.nn.softmax(ordered)
            before = probs.cumsum(axis=-1) - probs
            smallest = jnp.where(before < self.top_p, ordered, jnp.inf).min(
                axis=-1, keepdims=True
            )
            logits = jnp.where(logits < smallest, -jnp.inf, logits)
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


class _State(struct.PyTreeNode):
    """What the sampling loop carries."""

    step: jax.Array  # int32 scalar, tokens drawn so far for each sequence
    tokens: jax.Array  # [B, S] int32, those tokens
    ended: jax.Array  # [B] bool
    keys: jax.Array  # [B], one stream of random numbers a sequence
    cache: KVCache


def bucket(length: int, limit: int) -> int:
    """Returns the smallest 32 * 2^i that holds `length`, at most `limit`: few programs compile."""
    return min(32 * 2 ** max(0, math.ceil(math.log2(max(1, length) / 32))), limit)


def generate(
    params: Any,
    cfg: GPTConfig,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    eot: int | None = None,
    vocab_size: int = 0,
) -> list[list[int]]:
    """Continues each prompt, and returns the new tokens of each.

    Sequence i of seed s is drawn with its own random numbers, whatever else is in the batch.

    Args:
        params, cfg: of the model.
        prompts: tokens, at least one each, of any lengths.
        max_new_tokens: at most this many per prompt.
        sampling: how tokens are drawn.
        seed: of the random numbers.
        eot: ends a sequence, and is not part of the result; None: nothing does.
        vocab_size: tokens that may be drawn; 0: all. Padding of the vocabulary lies beyond.
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    if lengths.min() == 0:
        raise UserError("a prompt is empty")
    longest = int(lengths.max()) + max_new_tokens
    if longest > cfg.context_length:
        raise UserError(
            f"prompt and new tokens, {longest}, exceed the model's context of {cfg.context_length}"
        )
    if cfg.scan_layers:  # a scan would copy the whole cache at every token
        params = in_layout(params, scanned=False)
        cfg = dataclasses.replace(cfg, scan_layers=False)
    tokens = np.zeros(
        (len(prompts), bucket(lengths.max(), cfg.context_length)), np.int32
    )
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    end = -1 if eot is None else eot
    cache_length = bucket(longest, cfg.context_length)
    params = jax.tree.map(jnp.asarray, params)
    limits = dict(cfg=cfg, sampling=sampling, vocab_size=vocab_size or cfg.vocab_size)
    key = sample_key(seed)
    drawn = _generate(
        params, tokens, lengths, key, max_new_tokens, end, cache_length, **limits
    )
    rows = np.asarray(drawn[:, :max_new_tokens]).tolist()
    return [list(itertools.takewhile(lambda token: token != end, row)) for row in rows]


def write_samples(
    workdir: Path, params: Any, cfg: GPTConfig, tokenizer: Tokenizer, seed: int
) -> None:
    """Writes three texts of up to 256 tokens, from no prompt, into `workdir/samples.txt`."""
    first = tokenizer.eot or 0
    length = min(256, cfg.context_length - 1)
    how: Any = dict(
        max_new_tokens=length, sampling=Sampling(temperature=0.8, top_k=50), seed=seed
    )
    how |= dict(eot=tokenizer.eot, vocab_size=tokenizer.vocab_size)
    texts = generate(params, cfg, [[first]] * 3, **how)
    rule = "\n" + "-" * 80 + "\n"
    write_text(workdir / "samples.txt", rule.join(map(tokenizer.decode, texts)) + "\n")


@partial(jax.jit, static_argnames=("cache_length", "cfg", "sampling", "vocab_size"))
def _generate(
    params, tokens, lengths, key, limit, end, cache_length, cfg, sampling, vocab_size
) -> jax.Array:
    """Reads prompts [B, T] and draws until each has `limit` tokens or has ended: [B, S]."""
    extend: Any = partial(GPT(cfg).apply, {"params": params}, method=GPT.extend)
    B = tokens.shape[0]
    logits, cache = extend(tokens, lengths, KVCache.create(cfg, B, cache_length))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(B))
    drawn = jnp.full((B, cache_length), end, jnp.int32)
    state = _State(jnp.int32(0), drawn, jnp.zeros(B, bool), keys, cache)
    state = _append(state, logits[:, :vocab_size], end, sampling)

    def body(state: _State) -> _State:
        last = jax.lax.dynamic_slice_in_dim(state.tokens, state.step - 1, 1, axis=1)
        logits, cache = extend(last, jnp.ones(B, jnp.int32), state.cache)
        return _append(
            state.replace(cache=cache), logits[:, :vocab_size], end, sampling
        )

    def unfinished(state: _State) -> jax.Array:
        return (state.step < limit) & ~state.ended.all()

    return jax.lax.while_loop(unfinished, body, state).tokens


def _append(
    state: _State, logits: jax.Array, end: jax.Array, sampling: Sampling
) -> _State:
    """Draws one token for each sequence; one that has ended stays at its end."""
    keys = jax.vmap(jax.random.fold_in, (0, None))(state.keys, state.step)
    new = jnp.where(state.ended, end, sampling(logits, keys))
    return state.replace(
        step=state.step + 1,
        tokens=jax.lax.dynamic_update_slice_in_dim(
            state.tokens, new[:, None], state.step, 1
        ),
        ended=state.ended | (new == end),
    )


def define_flags() -> None:
    """Defines the flags of this command."""
    flags.DEFINE_string("prompt", "", "Text to continue.")
    flags.DEFINE_integer(
        "max_new_tokens",
        0,
        "At most this many tokens; 0: 200, or what fits.",
        lower_bound=0,
    )
    flags.DEFINE_float(
        "temperature", 1.0, "Divides the logits; 0: always the likeliest token."
    )
    flags.DEFINE_integer("top_k", 0, "Draw among the k likeliest tokens; 0: among all.")
    flags.DEFINE_float(
        "top_p", 1.0, "Draw among the likeliest tokens of this joint probability."
    )
    flags.DEFINE_integer("num_samples", 1, "How many continuations.", lower_bound=1)
    flags.DEFINE_integer(
        "seed", 0, "Of random numbers.", lower_bound=0, upper_bound=2**32 - 1
    )
    cli.define_source()


def main() -> None:
    """Continues `--prompt` in `--num_samples` ways."""
    args = flags.FLAGS
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    cfg, params, tokenizer = load_model(args.workdir, args.hf, args.checkpoint)
    prompt = tokenizer.encode(args.prompt).tolist()
    if not prompt and tokenizer.eot is not None:
        prompt = [tokenizer.eot]
    length = args.max_new_tokens or min(200, max(1, cfg.context_length - len(prompt)))
    how: Any = dict(max_new_tokens=length, sampling=sampling, seed=args.seed)
    how |= dict(eot=tokenizer.eot, vocab_size=tokenizer.vocab_size)
    for index, tokens in enumerate(
        generate(params, cfg, [prompt] * args.num_samples, **how)
    ):
        title = f"--- sample {index + 1}\n" if args.num_samples > 1 else ""
        print(f"{title}{args.prompt}{tokenizer.decode(tokens)}")


if __name__ == "__main__":
    cli.run(main, define_flags)
