"""Causal self-attention, `softmax(q k^T / sqrt(H)) v`, in several implementations.

    reference  as the formula stands, all `[T, T]` scores at once
    blocked    blocks of queries by all their keys, own backward rule, for CPUs
    xla        `jax.nn.dot_product_attention`
    cudnn      cuDNN's flash attention, on NVIDIA GPUs
    splash     Pallas splash attention, on TPUs

All of them keep softmax in float32 and heads a separate axis, so that heads can be spread over
devices. B batch, T time, N heads, H head size, S stored time.
"""

from functools import partial

import jax
import jax.numpy as jnp

from gpt2.architecture import ATTENTIONS as IMPLEMENTATIONS
from gpt2.errors import UserError
from gpt2.ops.blocked_attention import blocked_attention
from gpt2.parallel.rules import is_spread, map_devices

SHORT = 128  # positions up to which the reference takes no longer than blocks, on a CPU


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    implementation: str = "auto",
    segments: jax.Array | None = None,
    dropout: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Lets each position attend to itself and those before it.

    Args:
        q, k, v: `[B, T, N, H]`, one type.
        implementation: see the top of this file; 'auto' asks `resolve`.
        segments: `[B, T]` int32; positions see only those of the same number, where given.
        dropout: probability with which a weight is dropped. Weights must exist to be dropped, so
            anything but 0 takes 'reference'.
        dropout_key: what the dropped weights are drawn with.

    Returns:
        `[B, T, N, H]` of the type of `q`.

    Raises:
        UserError: the implementation does not exist or cannot run here.
    """
    platform = jax.default_backend()
    name = resolve(implementation, platform, q.dtype, q.shape[1], q.shape[3])
    if dropout or name == "reference":
        return attention_reference(
            q, k, v, segments=segments, dropout=dropout, dropout_key=dropout_key
        )
    if name == "blocked" and not is_spread("heads"):
        return blocked_attention(q, k, v, segments)
    if name in ("blocked", "splash"):
        kernel = {"blocked": _blocked, "splash": partial(_splash, interpret=platform != "tpu")}
        heads, rows = ("batch", "length", "heads", "head_size"), ("batch", "length")
        return map_devices(kernel[name], heads, rows)((q, k, v), segments)
    mask = None if segments is None else _same_segment(segments)
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation=name)


def resolve(
    implementation: str, platform: str, dtype: jnp.dtype, context_length: int, head_size: int
) -> str:
    """Names the implementation that a run will use.

    Args:
        implementation: 'auto' or an explicit choice.
        platform: 'cpu', 'gpu' or 'tpu'.
        dtype: compute type.
        context_length: T.
        head_size: H.

    Raises:
        UserError: the implementation does not exist or cannot run with these.
    """
    if implementation not in IMPLEMENTATIONS:
        raise UserError(
            f"model.attention={implementation!r} is not an implementation",
            f"Choose one of {', '.join(IMPLEMENTATIONS)}",
        )
    obstacles = {
        "cudnn": _cudnn_obstacle(platform, jnp.dtype(dtype), head_size),
        "splash": _splash_obstacle(platform, context_length),
    }
    if implementation == "auto":
        on_cpu = "blocked" if context_length > SHORT else "reference"
        preferred = {"cpu": on_cpu, "gpu": "cudnn", "tpu": "splash"}.get(platform, "xla")
        return "xla" if obstacles.get(preferred) else preferred
    if obstacle := obstacles.get(implementation):
        raise UserError(
            f"model.attention={implementation!r} {obstacle}",
            "Use model.attention='auto', which takes what the device offers",
        )
    return implementation


def attention_reference(q, k, v, *, segments=None, dropout=0.0, dropout_key=None):
    """What `attention` computes, as the formula stands."""
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
    time = jnp.arange(q.shape[1])
    visible = time[:, None] >= time[None, :]
    if segments is not None:
        visible &= _same_segment(segments)
    scores = jnp.where(visible, scores * q.shape[-1] ** -0.5, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(q.dtype)
    if dropout:
        kept = jax.random.bernoulli(dropout_key, 1.0 - dropout, weights.shape)
        weights = jnp.where(kept, weights / (1.0 - dropout), 0.0)
    return jnp.einsum("bnts,bsnh->btnh", weights, v, preferred_element_type=jnp.float32).astype(
        q.dtype
    )


def attention_cached(
    q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, length: jax.Array
) -> jax.Array:
    """Attention of new positions over a cache that already holds their keys and values.

    Args:
        q: `[B, T, N, H]`, the last T positions; T is 1 when decoding.
        k_cache, v_cache: `[B, N, S, H]`; entries from `length` on are not looked at.
        length: int32, scalar or `[B]`: positions held, the new ones included.

    Returns:
        `[B, T, N, H]` of the type of `q`.
    """
    T, S = q.shape[1], k_cache.shape[2]
    scores = jnp.einsum("btnh,bnsh->bnts", q, k_cache, preferred_element_type=jnp.float32)
    first = jnp.reshape(length, (-1, 1, 1, 1)) - T  # where the new positions start
    visible = jnp.arange(S) <= first + jnp.arange(T)[:, None]
    scores = jnp.where(visible, scores * q.shape[-1] ** -0.5, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(q.dtype)
    out = jnp.einsum("bnts,bnsh->btnh", weights, v_cache, preferred_element_type=jnp.float32)
    return out.astype(q.dtype)


def _blocked(qkv, segments):
    return blocked_attention(*qkv, segments)


def _splash(qkv, segments, interpret):
    """Splash attention takes one example, heads first, and leaves the scale to its caller."""
    # Only TPUs need it, and it takes a while to import.
    from jax.experimental.pallas.ops.tpu import splash_attention

    q, k, v = qkv
    T, N, H = q.shape[1:]
    block = max(size for size in (128, 256, 512) if T % size == 0)
    names = ("block_q", "block_kv", "block_kv_compute")
    blocks = splash_attention.BlockSizes(
        **dict.fromkeys(names, block),
        **dict.fromkeys((f"{name}_dkv" for name in names[:2]), block),
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    causal = splash_attention.CausalMask((T, T))
    kernel = splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([causal] * N),
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    ids = None if segments is None else splash_attention.SegmentIds(segments, segments)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q * H**-0.5, k, v))
    return jnp.swapaxes(jax.vmap(kernel)(q, k, v, ids), 1, 2)


def _same_segment(segments):
    """`[B, 1, T, T]`, true where both positions lie in one segment."""
    return segments[:, None, :, None] == segments[:, None, None, :]


def _cudnn_obstacle(platform, dtype, head_size):
    if platform != "gpu":
        return f"needs an NVIDIA GPU, and this is a {platform}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, and precision.compute is {dtype}"
    if head_size % 8 or head_size > 128:
        return f"needs heads of at most 128 in steps of 8, and these have {head_size}"
    return None


def _splash_obstacle(platform, context_length):
    if platform != "tpu":
        return f"needs a TPU, and this is a {platform}"
    if context_length % 128:
        return f"needs a context in steps of 128, and this one is {context_length}"
    return None
