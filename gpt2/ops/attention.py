"""Causal self-attention, `softmax(q k^T / sqrt(H)) v`, in several implementations.

    reference  as the formula stands, all `[T, T]` scores at once
    blocked    blocks of queries by all their keys, own backward rule, for CPUs
    xla        `jax.nn.dot_product_attention`
    cudnn      cuDNN's flash attention, on NVIDIA GPUs
    splash     Pallas splash attention, on TPUs

All compute softmax in float32. Query head n reads the keys of head n // (N / K).
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import chex
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from gpt2.errors import UserError
from gpt2.ops.blocked_attention import blocked_attention
from gpt2.ops.scores import Scoring
from gpt2.utils.platform import target
from gpt2.utils.remat import CORE_ATTENTION

IMPLEMENTATIONS = ("reference", "xla", "blocked", "cudnn", "splash")
SHORT = 64  # up to so many positions, the reference is as fast as blocks on a CPU


def attention(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H], of the type of `q`; K divides N
    v: jax.Array,
    *,
    implementation: str = "reference",  # as `resolve` names it
    scoring: Scoring = Scoring(),
    slopes: jax.Array | None = None,  # [N] float32, see `alibi_slopes`
    sinks: jax.Array
    | None = None,  # [N] float32, logits that take weight and give nothing
    segments: jax.Array
    | None = None,  # [B, T] int32; a position sees only its own segment
    dropout: float = 0.0,  # probability with which a weight is dropped, drawn by `dropout_key`
    dropout_key: jax.Array | None = None,
    map_kernel: Callable[[Callable], Callable] = lambda kernel: kernel,
) -> jax.Array:
    """Lets each position attend to itself and those before it; returns `[B, T, N, H]`.

    Only 'reference' has weights to drop: dropout selects it. `map_kernel` turns `kernel((q, k, v),
    (segments, slopes, sinks))` into a function on each device's part, for what XLA does not split.
    """
    B, T, N, H = q.shape
    chex.assert_shape(
        [k, v], (B, T, None, H)
    )  # of a single row or position they would broadcast
    chex.assert_equal_shape([k, v])
    chex.assert_is_divisible(N, k.shape[2])
    chex.assert_type([k, v], q.dtype)
    if segments is not None:
        chex.assert_shape(segments, (B, T))
        chex.assert_type(segments, int)
    if dropout or implementation == "reference" or target().plain:
        out = attention_reference(
            q, k, v, scoring, slopes, segments, sinks, dropout, dropout_key
        )
        return checkpoint_name(out, CORE_ATTENTION)
    others = segments, slopes, sinks
    if implementation == "xla":
        return _from_jax((q, k, v), others, scoring, "xla")
    if implementation == "cudnn":
        kernel: Callable = partial(_from_jax, scoring=scoring, implementation="cudnn")
        return map_kernel(kernel)((q, k, v), others)
    kernels: dict[str, Callable] = {
        "blocked": lambda qkv, others: blocked_attention(*qkv, *others, scoring),
        "splash": partial(_splash, scoring=scoring),
    }
    return map_kernel(kernels[implementation])((q, *_repeat_heads(q, k, v)), others)


def _from_jax(qkv, others, scoring, implementation):
    (q, k, v), (segments, slopes, _) = qkv, others
    bias = None
    if slopes is not None:
        time = jnp.arange(q.shape[1])
        bias = _biased(jnp.zeros((1, 1, 1, 1)), slopes, time[:, None], time)
        bias = bias.astype(q.dtype) if implementation == "cudnn" else bias
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias=bias,
        mask=None if segments is None else _same_segment(segments),
        scale=scoring.scale or None,
        is_causal=True,
        local_window_size=(scoring.window - 1, 0) if scoring.window else None,
        implementation=cast(Literal["xla", "cudnn"], implementation),
    )
    # A policy that knew cuDNN's output by two names would keep it twice.
    return out if implementation == "cudnn" else checkpoint_name(out, CORE_ATTENTION)


def resolve(
    implementation: str,
    platform: str,
    dtype: DTypeLike,
    context_length: int,
    head_size: int,
    *,
    scoring: Scoring = Scoring(),
    alibi: bool = False,
    sinks: bool = False,
) -> str:
    """Returns the implementation for `auto`; an explicit one that cannot run is a `UserError`."""

    def obstacle(name: str) -> str | None:
        if scoring.softcap and name in ("xla", "cudnn"):
            return "cannot compute model.attention_softcap"
        if sinks and name in ("xla", "cudnn"):
            return "cannot compute model.attention_sink"
        if alibi and name == "splash":
            return "cannot compute model.position=alibi"
        if (name == "cudnn" and platform != "gpu") or (
            name == "splash" and platform != "tpu"
        ):
            return f"does not run on this device ({platform})"
        if name == "cudnn" and jnp.dtype(dtype).itemsize != 2:
            return f"needs bfloat16 or float16, and precision.compute is {dtype}"
        if name == "cudnn" and (head_size % 8 or head_size > 128):
            return (
                f"needs heads of at most 128 in steps of 8, and these have {head_size}"
            )
        if name == "splash" and context_length % 128:
            return f"needs a context in steps of 128, and this one is {context_length}"
        return (
            None
            if name in IMPLEMENTATIONS
            else f"is not one of {', '.join(IMPLEMENTATIONS)}"
        )

    if implementation == "auto":
        on_cpu = "blocked" if context_length > SHORT else "reference"
        preferred = {"cpu": on_cpu, "gpu": "cudnn", "tpu": "splash"}.get(
            platform, "xla"
        )
        return next(
            name for name in (preferred, "xla", "reference") if not obstacle(name)
        )
    if found := obstacle(implementation):
        raise UserError(
            f"model.attention={implementation!r} {found}",
            "Use --config.model.attention=auto",
        )
    return implementation


@jax.custom_vjp
def softmax(x: jax.Array) -> jax.Array:
    """Returns `jax.nn.softmax`, and keeps its result alone for the backward pass.

    XLA would keep the exponentials too, since it can divide again at little cost.
    """
    return jax.nn.softmax(x)


def _softmax_fwd(x):
    y = jax.lax.optimization_barrier(jax.nn.softmax(x))
    return y, y


def _softmax_bwd(y, dy):
    return (y * (dy - (y * dy).sum(-1, keepdims=True)),)


softmax.defvjp(_softmax_fwd, _softmax_bwd)


def attention_reference(
    q,
    k,
    v,
    scoring=Scoring(),
    slopes=None,
    segments=None,
    sinks=None,
    dropout=0,
    dropout_key=None,
):
    """Computes `attention` by its formula; arguments and result as there."""
    k, v = _repeat_heads(q, k, v)
    time = jnp.arange(q.shape[1])
    visible = scoring.visible(time[:, None], time)
    if segments is not None:
        visible = visible & _same_segment(segments)
    products = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
    scores = _biased(scoring.scores(products, q.shape[-1]), slopes, time[:, None], time)
    scores = jnp.where(visible, scores, -jnp.inf)
    weights = _weights(
        jax.nn.softmax if target().plain else softmax, scores, sinks
    ).astype(q.dtype)
    if dropout:
        kept = jax.random.bernoulli(dropout_key, 1.0 - dropout, weights.shape)
        weights = jnp.where(kept, weights / (1.0 - dropout), 0.0)
    out = jnp.einsum("bnts,bsnh->btnh", weights, v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype)


def attention_cached(
    q: jax.Array,  # [B, T, N, H], the last T positions; T is 1 when decoding
    k_cache: jax.Array,  # [B, K, S, H]; entries from `length` on are ignored
    v_cache: jax.Array,
    length: jax.Array,  # int32, scalar or [B]: positions held, the new ones included
    *,
    scoring: Scoring = Scoring(),
    slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Lets new positions attend to a cache that holds their keys and values: `[B, T, N, H]`."""
    (B, T, N, H), (K, S) = q.shape, k_cache.shape[1:3]
    chex.assert_shape([k_cache, v_cache], (B, K, S, H))
    chex.assert_type([k_cache, v_cache], q.dtype)
    chex.assert_shape(length, (B,) if jnp.ndim(length) else ())
    first = jnp.reshape(length, (-1, 1, 1, 1)) - T  # where the new positions start
    query = first + jnp.arange(T)[:, None]
    key = jnp.arange(S)
    # The queries of a group are rows of one product: XLA:CPU has none of 16 bits with three axes.
    rows = jnp.moveaxis(q.reshape(B, T, K, N // K, H), 1, 3).reshape(B, K, -1, H)
    products = jnp.einsum(
        "bkrh,bksh->bkrs", rows, k_cache, preferred_element_type=jnp.float32
    )
    scores = _biased(
        scoring.scores(products.reshape(B, N, T, S), H), slopes, query, key
    )
    scores = jnp.where(scoring.visible(query, key), scores, -jnp.inf)
    weights = (
        _weights(jax.nn.softmax, scores, sinks).astype(q.dtype).reshape(B, K, -1, S)
    )
    out = jnp.einsum(
        "bkrs,bksh->bkrh", weights, v_cache, preferred_element_type=jnp.float32
    )
    return jnp.moveaxis(out.reshape(B, N, T, H), 1, 2).astype(q.dtype)


def _biased(scores, slopes, query, key):
    """Adds ALiBi's bias to scores `[B, N, T, S]`; `query` and `key` are positions."""
    return scores if slopes is None else scores + slopes[:, None, None] * (key - query)


def _weights(softmax, scores, sinks):
    """Returns the softmax of scores `[B, N, T, S]`, less what each head's sink takes."""
    if sinks is None:
        return softmax(scores)
    sinks = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
    return softmax(jnp.concatenate([scores, sinks], axis=-1))[..., :-1]


def _repeat_heads(q, k, v):
    """Gives each of the N heads of q its own heads of k and v."""
    times = q.shape[2] // k.shape[2]
    return (k, v) if times == 1 else tuple(jnp.repeat(x, times, axis=2) for x in (k, v))


def _splash(qkv, others, scoring):
    """Splash attention takes one example, heads first, and leaves the scale to its caller."""
    # It takes a while to import.
    from jax.experimental.pallas.ops.tpu import splash_attention

    (q, k, v), (segments, _, sinks) = qkv, others
    T, N, H = q.shape[1:]
    block = max(size for size in (128, 256, 512) if T % size == 0)
    names = (field.name for field in dataclasses.fields(splash_attention.BlockSizes))
    sizes: dict[str, Any] = {name: block for name in names if name.startswith("block_")}
    # Positions fill the lanes of a TPU, of which heads of 64 would leave half empty (v5e 2 %).
    layout = splash_attention.QKVLayout.SEQ_MINOR
    mask: Any = splash_attention.CausalMask((T, T))
    if scoring.window:
        mask = splash_attention.LocalMask((T, T), (scoring.window - 1, 0), offset=0)
    kernel = splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([mask] * N),
        block_sizes=splash_attention.BlockSizes(
            **sizes, k_layout=layout, v_layout=layout
        ),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=scoring.softcap or None,
        interpret=target().platform != "tpu",
        residual_checkpoint_name=CORE_ATTENTION,
    )
    ids = None if segments is None else splash_attention.SegmentIds(segments, segments)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q * scoring.factor(H), k, v))
    return jnp.swapaxes(jax.vmap(kernel, (0, 0, 0, 0, None))(q, k, v, ids, sinks), 1, 2)


def _same_segment(segments):
    """`[B, 1, T, T]`, true where both positions lie in one segment."""
    return segments[:, None, :, None] == segments[:, None, None, :]
