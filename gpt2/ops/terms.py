"""The term of attention's scores that kernels know; by any other, attention is its formula.

A term is a function of scores `[B, N, T, S]`, positions of queries and positions of keys, as
`gpt2.ops.plain.attention` applies it.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array

from gpt2.ops.plain import ScoreTerm

# From `kernel(q, k, v, segments)` to one that runs on each device's heads.
Spread = Callable[[Callable], Callable]


@dataclasses.dataclass(frozen=True)
class SoftCap:
    """`cap * tanh(x / cap)` of scores or logits (Gemma 2, arXiv 2408.00118)."""

    cap: float

    def __call__(self, x: Array, *_: Array) -> Array:
        """Returns `x` capped."""
        return self.cap * jnp.tanh(x / self.cap)


def softcap_of(terms: Sequence[ScoreTerm]) -> float | None:
    """Returns the cap if a soft cap is the only term, 0 without terms, and None for others."""
    if not terms:
        return 0.0
    first, *others = terms
    if others or not isinstance(first, SoftCap):
        return None
    # One that is learned is an array, to which kernels give no derivative.
    return first.cap if isinstance(first.cap, float | int) else None
