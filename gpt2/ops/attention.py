"""Causal self-attention, `softmax(q k^T / sqrt(H)) v`, in several implementations.

    reference  as the formula stands, all `[T, T]` scores at once
    blocked    blocks of queries by all their keys, own backward rule, for CPUs
    xla        `jax.nn.dot_product_attention`
    cudnn      cuDNN's flash attention, on NVIDIA GPUs
    splash     Pallas splash attention, on TPUs

All of them compute softmax in float32. Heads are a separate axis, so that they can be spread over
devices. B batch, T time, N heads, H head size, S stored time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import chex
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from gpt2.errors import UserError
from gpt2.ops.blocked_attention import blocked_attention

IMPLEMENTATIONS = ("reference", "xla", "blocked", "cudnn", "splash")
KERNELS = ("blocked", "splash")  # XLA does not split these over devices
SHORT = 128  # up to so many positions, the reference is as fast as blocks on a CPU


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    implementation: str = "reference",
    segments: jax.Array | None = None,
    dropout: float = 0.0,
    dropout_key: jax.Array | None = None,
    interpret: bool = False,
    map_kernel: Callable[[Callable], Callable] = lambda kernel: kernel,
) -> jax.Array:
    """Lets each position attend to itself and those before it.

    Args:
        q, k, v: `[B, T, N, H]`, one type.
        implementation: one of `IMPLEMENTATIONS`, as `resolve` names it.
        segments: `[B, T]` int32 or None; a position sees only positions of the same number.
        dropout: probability with which a weight is dropped. Only 'reference' has an array of
            weights to drop from, so any other value than 0 selects it.
        dropout_key: the key that draws the dropped weights.
        interpret: run the Pallas kernel of 'splash' in interpret mode, which platforms other than
            TPU need.
        map_kernel: turns `kernel((q, k, v), segments)` into a function that runs the kernel on
            each device's part; used for `KERNELS`.

    Returns:
        `[B, T, N, H]` of the type of `q`.

    Raises:
        ValueError: there is no such implementation.
    """
    if dropout or implementation == "reference":
        return attention_reference(
            q, k, v, segments=segments, dropout=dropout, dropout_key=dropout_key
        )
    _check_shapes(q, k, v, segments)
    if implementation == "blocked":
        return map_kernel(_blocked)((q, k, v), segments)
    if implementation == "splash":
        return map_kernel(partial(_splash, interpret=interpret))((q, k, v), segments)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    mask = None if segments is None else _same_segment(segments)
    name = cast(Literal["xla", "cudnn"], implementation)
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation=name)


def resolve(
    implementation: str, platform: str, dtype: DTypeLike, context_length: int, head_size: int
) -> str:
    """Returns the name of the implementation that a run will use.

    Args:
        implementation: 'auto' or an explicit choice.
        platform: 'cpu', 'gpu' or 'tpu'.
        dtype: compute type.
        context_length: T.
        head_size: H.

    Raises:
        UserError: the implementation does not exist or cannot run with these.
    """
    if implementation not in ("auto", *IMPLEMENTATIONS):
        raise UserError(
            f"model.attention={implementation!r} is not an implementation",
            f"Choose one of auto, {', '.join(IMPLEMENTATIONS)}",
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
            "Use model.attention='auto', which selects what the device supports",
        )
    return implementation


def attention_reference(q, k, v, *, segments=None, dropout=0.0, dropout_key=None):
    """Computes `attention` by its formula; arguments and result as there."""
    _check_shapes(q, k, v, segments)
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
    """Lets new positions attend to a cache that already holds their keys and values.

    Args:
        q: `[B, T, N, H]`, the last T positions; T is 1 when decoding.
        k_cache, v_cache: `[B, N, S, H]`; entries from `length` on are ignored.
        length: int32, scalar or `[B]`: positions held, the new ones included.

    Returns:
        `[B, T, N, H]` of the type of `q`.
    """
    chex.assert_rank([q, k_cache], 4)
    (B, T, N, H), S = q.shape, k_cache.shape[2]
    chex.assert_shape([k_cache, v_cache], (B, N, S, H))
    chex.assert_axis_dimension_gteq(k_cache, 2, T)
    chex.assert_type([k_cache, v_cache], q.dtype)
    chex.assert_shape(length, (B,) if jnp.ndim(length) else ())
    chex.assert_type(length, int)
    scores = jnp.einsum("btnh,bnsh->bnts", q, k_cache, preferred_element_type=jnp.float32)
    first = jnp.reshape(length, (-1, 1, 1, 1)) - T  # where the new positions start
    visible = jnp.arange(S) <= first + jnp.arange(T)[:, None]
    scores = jnp.where(visible, scores * q.shape[-1] ** -0.5, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(q.dtype)
    out = jnp.einsum("bnts,bnsh->btnh", weights, v_cache, preferred_element_type=jnp.float32)
    return out.astype(q.dtype)


def _check_shapes(q, k, v, segments):
    """Keys of a single head, row or position would broadcast, and segments likewise."""
    chex.assert_rank(q, 4)
    chex.assert_equal_shape([q, k, v])
    chex.assert_type([k, v], q.dtype)
    if segments is not None:
        chex.assert_shape(segments, q.shape[:2])
        chex.assert_type(segments, int)


def _blocked(qkv, segments):
    return blocked_attention(*qkv, segments)


def _splash(qkv, segments, interpret):
    """Splash attention takes one example, heads first, and leaves the scale to its caller."""
    # Only TPUs need it, and it takes a while to import.
    from jax.experimental.pallas.ops.tpu import splash_attention

    q, k, v = qkv
    T, N, H = q.shape[1:]
    block = max(size for size in (128, 256, 512) if T % size == 0)
    forward = ("block_q", "block_kv", "block_kv_compute")
    backward = ("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq")
    sizes: dict[str, Any] = dict.fromkeys((*forward, *backward), block)
    causal = splash_attention.CausalMask((T, T))
    kernel = splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([causal] * N),
        block_sizes=splash_attention.BlockSizes(**sizes),
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
