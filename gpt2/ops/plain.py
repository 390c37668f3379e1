"""The reference implementations of GPT-2's operations. JAX derives their gradients.

`GPT(config)` computes with these functions. A backend replaces them with faster functions of the
same signatures (gpt2/ops/table.py), and tests compare both. gpt2/model/gpt.py explains the
dimension letters. Products of 16-bit operands accumulate in float32. Softmax, statistics of rows
and losses are computed in float32.
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

from gpt2.utils.parameters import DeclaredParam, ParamInfo
from gpt2.utils.remat import CORE_ATTENTION
from gpt2.utils.trees import Batch, Tree

# The logit of a padding token. Its exponential is 0. It is finite, because the product of this 0
# and an infinite logit would be NaN.
MASKED_LOGIT = -1e9

Activation = Callable[[Array], Array]
# A function of scores [B, N, T, S], positions of queries [T, 1] and positions of keys [S] that
# returns new scores. The new scores must be finite even for keys after the query, which are masked
# later. The function may append columns to the scores: keys that get attention weight but have no
# value.
ScoreTerm = Callable[[Array, Array, Array], Array]
# A function of logits [B, T, V] and a batch of the same positions. It returns two results: the
# objective (a scalar to differentiate), and a tree of float32 sums to log. Both are sums over
# positions, so that the results of chunks add up to the result of all positions. No gradient flows
# through the batch or the logged sums.
LogitsLoss = Callable[[Array, Batch], tuple[Array, Tree]]


class Scoring(NamedTuple):
    """The parameters with which attention computes its weights from queries and keys."""

    scale: float  # factor of the products of queries and keys
    # Number of positions that a query sees, including its own; 0: all positions up to its own.
    window: int = 0
    terms: tuple[ScoreTerm, ...] = ()  # applied to the scores in this order
    # [B, T] int32; a query sees only keys of its own segment.
    segments: Array | None = None
    dropout: float = 0.0  # probability of dropping a weight
    dropout_key: Array | None = None

    @property
    def softcap(self) -> float | None:
        """The cap if a constant soft cap is the only term, 0 without terms, and otherwise None."""
        if not self.terms:
            return 0.0
        first, *others = self.terms
        if others or not isinstance(first, SoftCap):
            return None
        # A learned cap is an array, for which kernels would not compute a gradient.
        return first.cap if isinstance(first.cap, float | int) else None

    @property
    def slopes(self) -> Array | None:
        """The slopes `[N]` if a linear bias is the only term, and otherwise None."""
        if len(self.terms) == 1 and isinstance(self.terms[0], LinearBias):
            return self.terms[0].slopes
        return None


@dataclasses.dataclass(frozen=True)
class SoftCap:
    """The function that limits scores or logits x to ±cap: `cap * tanh(x / cap)`.

    The source is Gemma 2, arXiv 2408.00118.
    """

    cap: float

    def __call__(self, x: Array, *_: Array) -> Array:
        """Return `cap * tanh(x / cap)`."""
        return self.cap * jnp.tanh(x / self.cap)


@dataclasses.dataclass(frozen=True, eq=False)
class LinearBias:
    """The function that adds `slope * (key - query)` to scores, given the positions of both.

    Each of the N heads has its own slope: `slopes` is `[N]` float32. The source is ALiBi, arXiv
    2108.12409.
    """

    slopes: Array

    def __call__(self, scores: Array, query: Array, key: Array) -> Array:
        """Return the scores `[B, N, T, S]` with the bias added.

        `query` `[T, 1]` and `key` `[S]` are the positions of queries and keys.
        """
        return scores + self.slopes[:, None, None] * (key - query)


def linear(
    x: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    num_contract: int = 1,
    activation: Activation | None = None,
    dtype: DTypeLike,
) -> Array:
    """Multiply `activation(x)` by a kernel, and add a bias.

    `x` is `[..., C1, .., Cn]` with n = `num_contract`, `kernel` is `[C1, .., Cn, O1, .., Om]`, and
    `bias` is `[O1, .., Om]`. The result is `[..., O1, .., Om]` in `dtype`.
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
    """Apply P linear maps to `x` `[..., C]`, and return P results `[..., O1, .., Om]`.

    `kernel` is `[C, P, O1, .., Om]`, and `bias` is `[P, O1, .., Om]`. All results are computed by a
    single call of `linear`, which has the signature of `plain.linear`.
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
    """Apply LayerNorm or RMSNorm to rows `x` `[..., D]`, and return the result in `dtype`.

    RMSNorm (Zhang and Sennrich 2019) divides a row by `sqrt(mean square + eps)`, then multiplies by
    `scale` `[D]` and adds `bias` `[D]`. With `center`, the mean of the row is subtracted first,
    which makes it LayerNorm (Ba et al. 2016).
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
    """Apply GELU in its tanh form (Hendrycks and Gimpel 2016, section 2), as OpenAI's GPT-2 does.

    GELU is computed in float32. The result has the dtype of `x`.
    """
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


def gelu_erf(x: Array) -> Array:
    """Apply GELU in its exact form, with the error function."""
    return jax.nn.gelu(x, approximate=False)


def relu_squared(x: Array) -> Array:
    """Apply the square of ReLU (So et al. 2021)."""
    return jnp.square(jnp.maximum(x, 0))


# The functions that `model.activation` names. The MLP applies the function between its two linear
# maps. For names that end in "glu", the MLP applies the function to the result of a third map, and
# multiplies the result of the first map by this gate (Shazeer 2020).
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
    """Apply causal attention, `softmax(scale q k^T) v`.

    `q` and the result are `[B, T, N, H]`, `k` and `v` are `[B, T, K, H]`, all of one dtype. Query
    head n reads key head n // (N / K). `scoring` holds the scale, the window, functions that change
    the scores, segments and dropout.
    """
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    v = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
    time = jnp.arange(q.shape[1])
    visible = visible_keys(time[:, None], time, scoring.window)
    if (segments := scoring.segments) is not None:
        visible = visible & (segments[:, None, :, None] == segments[:, None, None, :])
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
    scores *= scoring.scale
    for term in scoring.terms:
        scores = term(scores, time[:, None], time)
    weights = masked_softmax(scores, visible).astype(q.dtype)
    if scoring.dropout_key is not None:
        keep_rate = 1.0 - scoring.dropout
        keep = jax.random.bernoulli(scoring.dropout_key, keep_rate, weights.shape)
        weights = jnp.where(keep, weights / keep_rate, 0.0)
    # This product also accumulates in float32. Its result is not float32, because its derivatives
    # would then be float32 too, and a GPU would move a fifth more bytes in a 124M step.
    out = jnp.einsum("bnts,bsnh->btnh", weights, v)
    return checkpoint_name(out, CORE_ATTENTION)  # for rematerialisation


def attention_cached(
    q: Array, k_cache: Array, v_cache: Array, scoring: Scoring, length: Array
) -> Array:
    """Apply `attention` to the last T positions, with keys and values from a cache.

    `q` is `[B, T, N, H]`. The caches are `[B, K, S, H]` and already hold the last T positions;
    entries from `length` (int32 `[B]`) on are ignored. The segments and the dropout of `scoring`
    are also ignored.
    """
    B, T, N, H = q.shape
    K, S = k_cache.shape[1:3]
    first = jnp.reshape(length, (-1, 1, 1, 1)) - T  # the first new position
    query = first + jnp.arange(T)[:, None]
    key = jnp.arange(S)
    # The queries of a group are rows of one product, because XLA:CPU cannot multiply 16-bit arrays
    # with three free axes.
    rows = q.reshape(B, T, K, N // K, H)
    rows = jnp.moveaxis(rows, 1, 3).reshape(B, K, -1, H)
    scores = jnp.einsum(
        "bkrh,bksh->bkrs", rows, k_cache, preferred_element_type=jnp.float32
    )
    scores = scores.reshape(B, N, T, S) * scoring.scale
    for term in scoring.terms:
        # A term takes positions [T, 1] that all sequences share. Here each sequence has its own
        # positions.
        def apply_term(scores: Array, query: Array, term: ScoreTerm = term) -> Array:
            return term(scores[None], query, key)[0]

        scores = jax.vmap(apply_term)(scores, query[:, 0])
    visible = visible_keys(query, key, scoring.window)
    weights = masked_softmax(scores, visible).astype(q.dtype)
    weights = weights.reshape(B, K, -1, S)
    out = jnp.einsum(
        "bkrs,bksh->bkrh", weights, v_cache, preferred_element_type=jnp.float32
    )
    out = out.reshape(B, N, T, H)
    return jnp.moveaxis(out, 1, 2).astype(q.dtype)


def visible_keys(query: Array, key: Array, window: int) -> Array:
    """Return the boolean mask of the keys that queries see: True for visible keys.

    A query sees the keys up to its own position or, with a `window` above 0, only the last `window`
    of these. `query` and `key` are positions, whose shapes broadcast to the shape of the mask.
    """
    visible = query >= key
    return visible & (query - key < window) if window else visible


def masked_softmax(scores: Array, visible: Array) -> Array:
    """Return the softmax of the scores over `visible` keys, `[B, N, T, S]`.

    A `ScoreTerm` (an example is the attention sink) may have appended columns to the scores. These
    columns take part in the softmax, and are left out of the result.
    """
    S = visible.shape[-1]
    masked = jnp.where(visible, scores[..., :S], -jnp.inf)
    appended = scores[..., S:]
    scores = jnp.concatenate([masked, appended], axis=-1)
    weights = jax.nn.softmax(scores)
    return weights[..., :S]


def rope_frequencies(size: int, base: float) -> Array:
    """Return RoPE's frequencies (Su et al. 2021): `base^(-2 i / size)` for i < `size / 2`.

    Frequency i is the angle, in radians per position, by which pair i of dimensions is rotated. The
    result is `[size / 2]` float32.
    """
    half = size // 2
    return base ** (-jnp.arange(half, dtype=jnp.float32) / half)


def rotation(
    positions: Array, frequencies: Array, length: float = 1.0
) -> tuple[Array, Array]:
    """Return the cosines and sines that `rope` reads, both `[B or 1, T, 1, R / 2]`.

    The angles are `positions`, int32 `[B or 1, T]`, times `frequencies` `[R / 2]`. Rotated vectors
    become `length` times as long.
    """
    angles = positions[:, :, None, None] * frequencies
    return length * jnp.cos(angles), length * jnp.sin(angles)


def rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate pairs of dimensions of `x` `[B, T, N, H]`, in float32, by the angles of `rotation`.

    `cos` and `sin` are `[B or 1, T, 1, R / 2]`. Only the first R dimensions of a head are rotated.
    Dimension i < R / 2 is paired with dimension i + R / 2, as in GPT-NeoX.
    """
    half = cos.shape[-1]
    wide = x.astype(jnp.float32)
    a, b, rest = jnp.split(wide, [half, 2 * half], axis=-1)
    first = a * cos - b * sin
    second = a * sin + b * cos
    rotated = jnp.concatenate([first, second, rest], axis=-1)
    return rotated.astype(x.dtype)


def head_loss(
    logits_loss: LogitsLoss,
    hidden: Array,
    table: Array,
    batch: Batch,
    *,
    dtype: DTypeLike,
    logits_dtype: DTypeLike = jnp.float32,
) -> tuple[Array, Tree]:
    """Return `logits_loss(logits, batch)`, where the logits are `hidden table^T`.

    `hidden` is `[B, T, D]` and `table` is `[V, D]`; the operands of their product have `dtype`. A
    kernel may round logits to `logits_dtype`. This function does not round them.
    """
    logits = compute_logits(hidden, table, dtype)
    objective, logged = logits_loss(logits, jax.lax.stop_gradient(batch))
    return objective, jax.lax.stop_gradient(logged)


def log_sum_exp(logits: Array) -> Array:
    """Return the log of softmax's normaliser, `[B, T]`, for logits `[B, T, V]`."""
    return jax.nn.logsumexp(logits, axis=-1)


def target_logits(logits: Array, targets: Array) -> Array:
    """Return the logits `[B, T]` of the targets, and 0 where a target is -1.

    The logits are selected by a comparison with the targets, not by a gather, because XLA can fuse
    a comparison with other passes over the logits, and can split it over V.
    """
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    return jnp.where(is_target, logits, 0.0).sum(-1)


def masked_sum(losses: Array, targets: Array) -> tuple[Array, Array]:
    """Return the sum of losses `[B, T]` where targets are not -1, and the number of these targets.

    Both are float32 scalars.
    """
    chex.assert_equal_shape([losses, targets])  # other shapes would broadcast silently
    is_real = targets >= 0
    return jnp.where(is_real, losses, 0.0).sum(), is_real.sum(dtype=jnp.float32)


def cross_entropy(logits: Array, batch: Batch) -> tuple[Array, Tree]:
    """Return the sum of `-log softmax(logits)` at the targets, in nats, and `()`.

    The empty tuple means that there are no sums to log.
    """
    losses = log_sum_exp(logits) - target_logits(logits, batch["targets"])
    return masked_sum(losses, batch["targets"])[0], ()


def mask_padding(logits: Array, vocab_size: int) -> Array:
    """Set the logits of padding tokens, from index `vocab_size` on, to `MASKED_LOGIT`."""
    chex.assert_axis_dimension_gteq(logits, -1, vocab_size)
    tokens = jnp.arange(logits.shape[-1])
    if vocab_size == tokens.size:
        return logits
    return jnp.where(tokens < vocab_size, logits, MASKED_LOGIT)


def compute_logits(hidden: Array, table: Array, dtype: DTypeLike) -> Array:
    """Return float32 logits `[B, T, V]` for hidden states `[B, T, D]` and a table `[V, D]`.

    The operands of the product are cast to `dtype`.
    """
    hidden = hidden.astype(dtype)
    table = table.astype(dtype)
    return jnp.einsum("btd,vd->btv", hidden, table, preferred_element_type=jnp.float32)


def look_up(table: Array, indices: Array, dtype: DTypeLike) -> Array:
    """Return the rows `[B, T, D]` of a table `[V, D]` at int32 indices `[B, T]`.

    An index of V or more yields NaN. As in Python, -1 is the last row.
    """
    return jnp.take(table, indices, axis=0).astype(dtype)


def add_rows(x: Array, table: Array) -> Array:
    """Add the first T rows of a table `[rows, D]` to every sequence of `x` `[B, T, D]`."""
    return x + table[: x.shape[1]].astype(x.dtype)


# The operations below concern arrays that may be sharded over devices. These versions are for one
# device, on which nothing is sharded.

Init = Callable[..., Array]  # a function of a key, a shape and a dtype
Shape = tuple[int, ...]
AxisNames = tuple[str, ...]  # logical names of axes


def param(
    module: nn.Module, name: str, init: Init, shape: Shape, info: ParamInfo
) -> Array:
    """Return the float32 parameter `name` of a module, which `init(key, shape, dtype)` draws.

    `info` declares the parameter's axes and roles.
    """

    def declare(*arguments: Array | Shape | DTypeLike) -> Tree:  # Flax unboxes it
        return DeclaredParam(init(*arguments), info)

    return module.param(name, declare, shape, jnp.float32, unbox=True)


def whole(parameter: Array) -> Array:
    """Return `parameter`, a result of `param`, unchanged.

    With FSDP by layer, a function that gathers the parameter's shards replaces this function.
    """
    return parameter


def pad_vocab(table: Array) -> Array:
    """Return the table `[V, D]` unchanged.

    A backend may replace this function with one that adds rows of zeros, so that the number of rows
    is a multiple of 128.
    """
    return table


def constrain(x: Array, *names: str) -> Array:
    """Return `x` unchanged. `names` are the logical names of its last axes.

    A backend may replace this function with one that shards `x` according to these names.
    """
    return x
