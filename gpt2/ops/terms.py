"""Terms of attention's scores that kernels know; by any other, attention is its formula.

Each is a function of scores `[B, N, T, S]`, positions of queries and positions of keys, as
`gpt2.ops.plain.attention` applies it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from gpt2.ops.plain import ScoreTerm


@dataclasses.dataclass(frozen=True)
class SoftCap:
    """`cap * tanh(x / cap)` of scores or logits (Gemma 2, arXiv 2408.00118)."""

    cap: float

    def __call__(self, x: Array, *_: Array) -> Array:
        """Returns `x` capped."""
        return self.cap * jnp.tanh(x / self.cap)


@dataclasses.dataclass(frozen=True)
class Alibi:
    """Adds a bias by distance (Press et al. 2022); `slopes` `[N]` float32 are not learned."""

    slopes: Array

    def __call__(self, scores: Array, query: Array, key: Array) -> Array:
        """Returns scores less each head's slope times how far back a key is."""
        slopes = jax.lax.stop_gradient(self.slopes)  # kernels give no derivative
        return scores + slopes[:, None, None] * (key - query)


@dataclasses.dataclass(frozen=True)
class Sinks:
    """A key without a value for each head (gpt-oss, 2508.10925); `logits` are `[N]` float32."""

    logits: Array

    def __call__(self, scores: Array, query: Array, key: Array) -> Array:
        """Returns scores with a column more, which takes weight."""
        by_head = self.logits[:, None, None]
        shape = (*scores.shape[:-1], 1)
        column = jnp.broadcast_to(by_head, shape)
        return jnp.concatenate([scores, column], axis=-1)


# From `kernel((q, k, v), (segments, slopes, sinks))` to one that runs on each device's heads.
Spread = Callable[[Callable], Callable]


class KnownTerms(NamedTuple):
    """The three terms, each at most once and in this order, as kernels take them."""

    softcap: float = 0.0  # 0: none
    slopes: Array | None = None
    sinks: Array | None = None

    @classmethod
    def of(cls, terms: Sequence[ScoreTerm]) -> "KnownTerms | None":
        """Returns `terms` if they are among the three, in their order; else None."""
        by_kind = {type(term): term for term in terms}
        if [*map(type, terms)] != [kind for kind in KNOWN if kind in by_kind]:
            return None
        cap = by_kind.get(SoftCap)
        alibi = by_kind.get(Alibi)
        sinks = by_kind.get(Sinks)
        if isinstance(cap, SoftCap) and not isinstance(cap.cap, float | int):
            return None  # it may be learned
        return cls(
            softcap=cap.cap if isinstance(cap, SoftCap) else 0.0,
            slopes=alibi.slopes if isinstance(alibi, Alibi) else None,
            sinks=sinks.logits if isinstance(sinks, Sinks) else None,
        )


KNOWN = (SoftCap, Alibi, Sinks)
