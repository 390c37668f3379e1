"""What every implementation of attention shares: scores, which keys a query sees, positions."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
    """Returns `cap * tanh(x / cap)`, which lies between -cap and cap; `x` where `cap` is 0."""
    return cap * jnp.tanh(x / cap) if cap else x


@dataclasses.dataclass(frozen=True)
class Scoring:
    """What happens to `q k^T` before softmax, beside biases and segments."""

    window: int = (
        0  # positions that one sees, itself included (as Mistral's); 0: all before it
    )
    softcap: float = (
        0.0  # c > 0: scores x become c tanh(x / c) (Gemma 2, arXiv 2408.00118, sec. 2)
    )
    scale: float = 0.0  # factor of the products; 0: 1 / sqrt(H)

    def factor(self, head_size: int) -> float:
        """Returns the factor of the products."""
        return self.scale or head_size**-0.5

    def scores(self, products: jax.Array, head_size: int) -> jax.Array:
        """Returns scores for products of queries and keys, float32."""
        return soft_cap(products * self.factor(head_size), self.softcap)

    def visible(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Returns whether positions `query` see positions `key`, which broadcast together."""
        seen = query >= key
        return seen & (query - key < self.window) if self.window else seen


def alibi_slopes(num_heads: int) -> jax.Array:
    """Returns the slope of each head, `[N]` float32 (Press et al. 2022, section 3, and code)."""
    smaller = 2 ** math.floor(math.log2(num_heads))
    first = [2.0 ** (-8.0 * (i + 1) / smaller) for i in range(smaller)]
    rest = [2.0 ** (-8.0 * (i + 0.5) / smaller) for i in range(num_heads - smaller)]
    return jnp.array(first + rest, jnp.float32)


def rotation(
    positions: jax.Array,
    size: int,
    base: float,
    scaling: str,
    factor: float,
    context: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines for `positions` `[B or 1, T]`, each `[B or 1, T, 1, size / 2]`.

    Of the halves of a head's first `size` dimensions, as GPT-NeoX splits them, dimension i of
    either turns by the angle `position / base^(2 i / size)` (Su et al. 2021). Scaling divides the
    frequencies that make few turns in `context` tokens by `factor` and keeps those that make many.
    YaRN lengthens the vectors too, so that scores spread less over more tokens.
    """
    half = size // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling != "none":
        kept = _share_kept(frequencies, base, scaling, context)
        frequencies = kept * frequencies + (1 - kept) * frequencies / factor
    length = 0.1 * math.log(factor) + 1 if scaling == "yarn" else 1
    angles = positions[:, :, None, None] * frequencies
    return length * jnp.cos(angles), length * jnp.sin(angles)


def _share_kept(
    frequencies: jax.Array, base: float, scaling: str, context: int
) -> jax.Array:
    """Returns how much of each frequency is kept, between 0 for few turns and 1 for many."""
    half = len(frequencies)
    if scaling == "llama3":  # from 1 turn to 4
        share = (context * frequencies / (2 * math.pi) - 1) / (4 - 1)
    else:  # from 1 turn to 32, and linear in the dimension, as in the paper's code
        first, last = (
            half * math.log(context / (2 * math.pi * n), base) for n in (32, 1)
        )
        first = max(math.floor(first), 0)
        last = min(math.ceil(last), 2 * half - 1)
        share = 1 - (jnp.arange(half) - first) / max(last - first, 0.001)
    return jnp.clip(share, 0, 1)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns the vectors of `x` `[B, T, N, H]`, computed in float32, by `rotation`'s angles."""
    (B, T, _, _), half = x.shape, cos.shape[-1]
    chex.assert_shape([cos, sin], ({1, B}, T, 1, half))
    a, b, rest = jnp.split(x.astype(jnp.float32), [half, 2 * half], axis=-1)
    return jnp.concatenate(
        [a * cos - b * sin, a * sin + b * cos, rest], axis=-1
    ).astype(x.dtype)
