"""GPT-2's operations as formulas: arrays in, arrays out, derivatives left to JAX.

`GPT(config)` computes by these. A backend puts faster functions of the same signatures in their
place (gpt2/ops/table.py), and tests hold those to the formulas. gpt2/model/gpt.py explains the
letters of dimensions. Products of 16-bit operands add up in float32; softmax, statistics of rows
and losses are float32.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from gpt2.utils.remat import CORE_ATTENTION
from gpt2.utils.trees import Batch, Tree

# The logit of padding: its exponential is 0; finite, so that 0 times it is 0.
IMPOSSIBLE = -1e9

Activation = Callable[[Array], Array]
# From scores [B, N, T, S], positions of queries [T, 1] and of keys [S] to scores, finite for keys
# after the query too, which are masked later. It may append columns: keys that take weight and have
# no value.
ScoreTerm = Callable[[Array, Array, Array], Array]
# From logits [B, T, V] and a batch of the same positions to the objective, a scalar to be
# differentiated, and a tree of float32 sums to log. All are sums over positions, so that the
# results of parts add up to the result of the whole. The batch and the sums have no derivative.
LogitsLoss = Callable[[Array, Batch], tuple[Array, Tree]]


class Scoring(NamedTuple):
    """How attention weighs values, beside queries and keys."""

    scale: float  # factor of their products
    window: int = 0  # positions that one sees, itself included; 0: all before it
    terms: tuple[ScoreTerm, ...] = ()  # what happens to the scores, in order
    segments: Array | None = None  # [B, T] int32; a position sees only its own segment
    dropout: float = 0.0  # probability with which a weight is dropped
    dropout_key: Array | None = None

    @property
    def softcap(self) -> float | None:
        """The cap, if a soft cap is the only term; 0: there is no term; None: there are others."""
        if not self.terms:
            return 0.0
        first, *others = self.terms
        if others or not isinstance(first, SoftCap):
            return None
        # One that is learned is an array, to which kernels would give no derivative.
        return first.cap if isinstance(first.cap, float | int) else None


@dataclasses.dataclass(frozen=True)
class SoftCap:
    """`cap * tanh(x / cap)` of scores or logits (Gemma 2, arXiv 2408.00118)."""

    cap: float

    def __call__(self, x: Array, *_: Array) -> Array:
        """Returns `x` capped."""
        return self.cap * jnp.tanh(x / self.cap)


def linear(
    x: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    num_contract: int = 1,
    activation: Activation | None = None,
    dtype: DTypeLike,
) -> Array:
    """Maps `activation(x)` `[..., C1, .., Cn]` to `[..., O1, .., Om]` in `dtype`.

    `kernel` is `[C1, .., Cn, O1, .., Om]`, n = `num_contract`; `bias` is `[O1, .., Om]`.
    """
    x = x.astype(dtype)
    if activation:
        x = activation(x)
    y = jnp.tensordot(
        x, kernel.astype(dtype), num_contract, preferred_element_type=jnp.float32
    )
    if bias is not None:
        y = y + bias
    return y.astype(dtype)


def linear_parts(
    x: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    dtype: DTypeLike,
    linear: Callable = linear,
) -> list[Array]:
    """Maps `[..., C]` by a kernel `[C, P, O1, .., Om]` to P results `[..., O1, .., Om]`.

    It is one `linear` map, by the formula or by another function for it.
    """
    y = linear(x, kernel, bias, dtype=dtype)
    return [*jnp.unstack(y, axis=x.ndim - 1)]


def norm(
    x: Array,
    scale: Array,
    bias: Array | None = None,
    *,
    center: bool = True,
    eps: float = 1e-5,
    dtype: DTypeLike,
) -> Array:
    """Divides rows `[..., D]` by their root mean square, times `scale` `[D]`, plus `bias` `[D]`.

    With `center` the mean is subtracted first: LayerNorm (Ba et al. 2016), else RMSNorm (Zhang and
    Sennrich 2019). `eps` joins the mean square.
    """
    y = x.astype(jnp.float32)
    if center:
        y -= y.mean(axis=-1, keepdims=True)
    mean_square = jnp.square(y).mean(axis=-1, keepdims=True)
    y *= jax.lax.rsqrt(mean_square + eps)
    y *= scale
    if bias is not None:
        y = y + bias
    return y.astype(dtype)


def gelu_tanh(x: Array) -> Array:
    """Returns GELU in its tanh form (Hendrycks and Gimpel 2016, section 2), as OpenAI's GPT-2."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


def gelu_erf(x: Array) -> Array:
    """Returns GELU in its exact form."""
    return jax.nn.gelu(x, approximate=False)


def relu_squared(x: Array) -> Array:
    """Returns the square of the positive part (So et al. 2021)."""
    return jnp.square(jnp.maximum(x, 0))


# `model.activation` -> the function between the MLP's two linear maps. Of those that end in glu it
# is the function of a third map, which multiplies the first one's result (Shazeer 2020).
ACTIVATIONS: dict[str, Activation] = {
    "gelu_tanh": gelu_tanh,
    "gelu": gelu_erf,
    "relu": jax.nn.relu,
    "relu_squared": relu_squared,
    "silu": jax.nn.silu,
    "swiglu": jax.nn.silu,
    "geglu": gelu_tanh,
}


def attention(q: Array, k: Array, v: Array, scoring: Scoring) -> Array:
    """Lets each position attend to itself and those before it: `softmax(scale q k^T) v`.

    `q` is `[B, T, N, H]`, and so is the result, in its type; `k` and `v` are `[B, T, K, H]`. Query
    head n reads the keys of head n // (N / K).
    """
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    v = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
    time = jnp.arange(q.shape[1])
    visible = sees(time[:, None], time, scoring.window)
    if (segments := scoring.segments) is not None:
        visible = visible & (segments[:, None, :, None] == segments[:, None, None, :])
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
    scores *= scoring.scale
    for term in scoring.terms:
        scores = term(scores, time[:, None], time)
    weights = masked_softmax(scores, visible).astype(q.dtype)
    if scoring.dropout_key is not None:
        share = 1.0 - scoring.dropout
        kept = jax.random.bernoulli(scoring.dropout_key, share, weights.shape)
        weights = jnp.where(kept, weights / share, 0.0)
    # It adds up in float32 too. Asked for in float32, its derivatives would be, and a GPU would
    # move a fifth more in a step of 124M.
    out = jnp.einsum("bnts,bsnh->btnh", weights, v)
    return checkpoint_name(out, CORE_ATTENTION)  # for rematerialisation


def attention_cached(
    q: Array, k_cache: Array, v_cache: Array, length: Array, scoring: Scoring
) -> Array:
    """Lets the last T positions, `q` `[B, T, N, H]`, attend to a cache that holds them too.

    The cache is `[B, K, S, H]`; entries from `length`, int32 `[B]`, on are ignored. Otherwise it is
    `attention`, without segments and dropout.
    """
    B, T, N, H = q.shape
    K, S = k_cache.shape[1:3]
    first = jnp.reshape(length, (-1, 1, 1, 1)) - T  # where the new positions start
    query = first + jnp.arange(T)[:, None]
    key = jnp.arange(S)
    # The queries of a group are rows of one product: XLA:CPU has none of 16 bits with three axes.
    rows = q.reshape(B, T, K, N // K, H)
    rows = jnp.moveaxis(rows, 1, 3).reshape(B, K, -1, H)
    scores = jnp.einsum(
        "bkrh,bksh->bkrs", rows, k_cache, preferred_element_type=jnp.float32
    )
    scores = scores.reshape(B, N, T, S) * scoring.scale
    for term in scoring.terms:
        # Each sequence has its own positions.
        def of_one(scores: Array, query: Array, term: ScoreTerm = term) -> Array:
            return term(scores[None], query, key)[0]

        scores = jax.vmap(of_one)(scores, query[:, 0])
    visible = sees(query, key, scoring.window)
    weights = masked_softmax(scores, visible).astype(q.dtype)
    weights = weights.reshape(B, K, -1, S)
    out = jnp.einsum(
        "bkrs,bksh->bkrh", weights, v_cache, preferred_element_type=jnp.float32
    )
    out = out.reshape(B, N, T, H)
    return jnp.moveaxis(out, 1, 2).astype(q.dtype)


def sees(query: Array, key: Array, window: int) -> Array:
    """Returns whether positions `query` see positions `key`, which broadcast together."""
    visible = query >= key
    return visible & (query - key < window) if window else visible


def masked_softmax(scores: Array, visible: Array) -> Array:
    """Returns weights `[B, N, T, S]` of `visible` keys; further columns take theirs."""
    S = visible.shape[-1]
    of_keys = jnp.where(visible, scores[..., :S], -jnp.inf)
    further = scores[..., S:]
    scores = jnp.concatenate([of_keys, further], axis=-1)
    weights = jax.nn.softmax(scores)
    return weights[..., :S]


def rope_frequencies(size: int, base: float) -> Array:
    """Returns turns per position of pairs of dimensions, `[size / 2]` (Su et al. 2021)."""
    half = size // 2
    return base ** (-jnp.arange(half, dtype=jnp.float32) / half)


def rotation(
    positions: Array, frequencies: Array, length: float = 1.0
) -> tuple[Array, Array]:
    """Returns cosines and sines of position times frequency, `[B or 1, T, 1, R / 2]`, for `rope`.

    `positions` are `[B or 1, T]` int32; vectors get `length` times as long.
    """
    angles = positions[:, :, None, None] * frequencies
    return length * jnp.cos(angles), length * jnp.sin(angles)


def rope(x: Array, cos: Array, sin: Array) -> Array:
    """Turns pairs of dimensions of `x` `[B, T, N, H]`, in float32, by the angles of `rotation`.

    A pair has a dimension of either half of the first R, as GPT-NeoX splits them.
    """
    half = cos.shape[-1]
    wide = x.astype(jnp.float32)
    a, b, rest = jnp.split(wide, [half, 2 * half], axis=-1)
    first = a * cos - b * sin
    second = a * sin + b * cos
    turned = jnp.concatenate([first, second, rest], axis=-1)
    return turned.astype(x.dtype)


def head_loss(
    loss: LogitsLoss,
    hidden: Array,
    table: Array,
    batch: Batch,
    *,
    dtype: DTypeLike,
    logits_dtype: DTypeLike = jnp.float32,
) -> tuple[Array, Tree]:
    """Returns `loss(logits, batch)` of the logits `hidden table^T`.

    `hidden` is `[B, T, D]`, `table` `[V, D]`; the product's operands have `dtype`. A kernel may
    store logits in `logits_dtype`.
    """
    logits = logits_of(hidden, table, dtype)
    objective, logged = loss(logits, jax.lax.stop_gradient(batch))
    return objective, jax.lax.stop_gradient(logged)


def log_sum_exp(logits: Array) -> Array:
    """Returns the log of softmax's normaliser, `[B, T]`, of logits `[B, T, V]`."""
    return jax.nn.logsumexp(logits, axis=-1)


def pick(logits: Array, targets: Array) -> Array:
    """Returns the logits `[B, T]` of targets, 0 where one is -1.

    By a comparison in place of a gather: it joins a pass over the logits, and splits over V.
    """
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    return jnp.where(is_target, logits, 0.0).sum(-1)


def sum_real(losses: Array, targets: Array) -> tuple[Array, Array]:
    """Returns the sum of losses `[B, T]` where targets are not -1, and how many there are."""
    chex.assert_equal_shape([losses, targets])  # others would broadcast
    is_real = targets >= 0
    return jnp.where(is_real, losses, 0.0).sum(), is_real.sum(dtype=jnp.float32)


def cross_entropy(logits: Array, batch: Batch) -> tuple[Array, Tree]:
    """Sums `-log softmax(logits)` at the targets, in nats."""
    losses = log_sum_exp(logits) - pick(logits, batch["targets"])
    return sum_real(losses, batch["targets"])[0], ()


def hide_padding(logits: Array, vocab_size: int) -> Array:
    """Returns logits of which those from `vocab_size` on are impossible."""
    chex.assert_axis_dimension_gteq(logits, -1, vocab_size)
    tokens = jnp.arange(logits.shape[-1])
    if vocab_size == tokens.size:
        return logits
    return jnp.where(tokens < vocab_size, logits, IMPOSSIBLE)


def logits_of(hidden: Array, table: Array, dtype: DTypeLike) -> Array:
    """Returns logits `[B, T, V]`, float32, of rows `[B, T, D]` and a table `[V, D]`."""
    hidden = hidden.astype(dtype)
    table = table.astype(dtype)
    return jnp.einsum("btd,vd->btv", hidden, table, preferred_element_type=jnp.float32)


def look_up(table: Array, indices: Array, dtype: DTypeLike) -> Array:
    """Returns rows of a table `[V, D]` by int32 `[B, T]`, `[B, T, D]`; NaN where there is none."""
    return jnp.take(table, indices, axis=0).astype(dtype)


def add_rows(x: Array, table: Array) -> Array:
    """Adds the first T rows of a table `[rows, D]` to every sequence of `x` `[B, T, D]`."""
    return x + table[: x.shape[1]].astype(x.dtype)


# What a table has for arrays that are spread over devices. Nothing is, here.

Init = Callable[..., Array]  # of a key, a shape and a type
Shape = tuple[int, ...]
Names = tuple[str, ...]  # of axes


def param(module: nn.Module, name: str, init: Init, shape: Shape, axes: Names) -> Array:
    """Returns a parameter of a module, float32; its axes have names."""
    boxed = nn.with_logical_partitioning(init, axes)
    return module.param(name, boxed, shape, jnp.float32, unbox=True)


def whole(parameter: Array) -> Array:
    """Returns a parameter that every device has whole, of what `param` returned."""
    return parameter


def pad_vocab(table: Array) -> Array:
    """Returns a table `[V, D]` with as many rows as a head's product wants."""
    return table


def constrain(x: Array, *names: str) -> Array:
    """Spreads an activation by the names of its last axes."""
    return x


def isolate(loss: Callable) -> Callable:
    """Returns a loss `loss(params, micro_batch, ...)` that is computed apart from others'."""
    return loss
