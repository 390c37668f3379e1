"""From products of queries and keys to scores, and which keys a query sees.

Every implementation of attention takes these from here.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
    """Returns `cap * tanh(x / cap)`, which lies between -cap and cap; `x` where `cap` is 0."""
    return cap * jnp.tanh(x / cap) if cap else x


@dataclasses.dataclass(frozen=True)
class Scoring:
    """What happens to `q k^T` before softmax, beside biases and segments."""

    window: int = 0  # positions that one sees, itself included (as Mistral's); 0: all before it
    softcap: float = 0.0  # c > 0: scores x become c tanh(x / c) (Gemma 2, arXiv 2408.00118, sec. 2)
    scale: float = 0.0  # factor of the products; 0: 1 / sqrt(H)

    def factor(self, head_size: int) -> float:
        """Returns the factor of the products."""
        return self.scale or head_size**-0.5

    def scores(self, products: jax.Array, head_size: int) -> jax.Array:
        """Returns scores for products of queries and keys, float32."""
        scores = products * self.factor(head_size)
        return soft_cap(scores, self.softcap)

    def visible(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Returns whether positions `query` see positions `key`, which broadcast together."""
        seen = query >= key
        return seen & (query - key < self.window) if self.window else seen


def alibi_slopes(num_heads: int) -> jax.Array:
    """Returns the slope of each head, `[N]` float32 (Press et al. 2022, section 3).

    A geometric series from 2^(-8/N) with that ratio. If N is no power of two, every second slope of
    the next larger power follows those of the next smaller one, as in the paper's code.
    """

    def series(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / count) for i in range(count)]

    smaller = 2 ** math.floor(math.log2(num_heads))
    slopes = series(smaller) + series(2 * smaller)[::2][: num_heads - smaller]
    return jnp.array(slopes, jnp.float32)
