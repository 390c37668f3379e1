"""The output head and the loss as one operation, computed for one chunk of positions at a time.

The logits `[B, T, V]` are the largest array of a training step. Here, only the logits of one chunk
exist at a time, and the gradients of a chunk are computed in the same pass. For example, the
float32 logits of thirty sequences of 1,024 tokens take 6.2 GB with GPT-2's vocabulary. Under FSDP
by layer, where memory is scarce, one chunk of these logits takes 0.4 GB. Without chunks, a 124M
step on two cores takes a quarter longer.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from gpt2.ops.linear import dot
from gpt2.ops.plain import LogitsLoss
from gpt2.ops.table import LookUpFn
from gpt2.ops.variants import Variants
from gpt2.utils.trees import Batch, Tree

# The largest size of a chunk's float32 logits in bytes. With GPT-2's vocabulary, these are the
# logits of 42,000 tokens. With four chunks, a step of 32,768 tokens takes 1.03 times as long on an
# H200 as with one chunk, and needs 6.7 GiB less.
LOGITS_BYTES = 8 * 2**30
SCARCE_LOGITS_BYTES = 2**29  # memory is scarce with FSDP by layer
CPU_LOGITS_BYTES = 2**23  # CPUs are faster if a chunk fits in their caches
# The smallest number of tokens in a chunk on CPUs. Chunks are not smaller, because every chunk adds
# its gradient to the gradient of the whole table. This addition takes longer if the table does not
# fit in a cache, so the chunks of a large table are larger.
CPU_TOKENS = 512
LARGE_TABLE_BYTES = 2**25
LARGE_TABLE_TOKENS = 2048


def head_loss(
    logits_loss: LogitsLoss,
    hidden: Array,
    table: Array,
    rows: Batch,
    *,
    dtype: DTypeLike,
    logits_dtype: DTypeLike = jnp.float32,
    variants: Variants,
    num_tokens: int,
) -> tuple[Array, Tree]:
    """Return `logits_loss(logits, rows)`, with the logits of about `num_tokens` tokens at a time.

    The logits are the product of `hidden` `[B, T, D]` and the head's `table` `[V, D]`. The operands
    of the product have `dtype`, and the logits are rounded to `logits_dtype`. `rows` is the batch,
    arrays `[B, T]`. `variants` chooses how the products are computed. `plain.head_loss` is the
    reference implementation.
    """
    B, T, _ = hidden.shape
    chunk = _choose_chunk(T, max(1, num_tokens // B))
    logits = jax.ShapeDtypeStruct((B, chunk, len(table)), jnp.float32)
    example = jax.eval_shape(partial(jax.tree.map, lambda x: x[:, :chunk]), rows)
    # Learned parameters that the loss closes over become arguments, so that JAX computes their
    # gradients.
    logits_loss, closed_over = jax.closure_convert(logits_loss, logits, example)
    sums = jax.eval_shape(logits_loss, logits, example, *closed_over)
    zeros = jax.tree.map(jnp.zeros_like, sums)
    dtype = jnp.dtype(dtype)
    head = _Head(logits_loss, dtype, jnp.dtype(logits_dtype), variants, chunk)
    return _loss(hidden.astype(dtype), table, rows, closed_over, zeros, head)


def chunk_tokens(platform: str, table: tuple[int, int], *, is_scarce: bool) -> int:
    """Return the number of tokens whose logits `head_loss` computes at a time.

    `table` is the shape `[V, D]` of the head's table. `is_scarce` says whether memory is scarce, as
    it is with FSDP by layer. The number is then smaller on GPUs and TPUs.
    """
    V, D = table
    if platform == "cpu":
        least = LARGE_TABLE_TOKENS if 4 * V * D > LARGE_TABLE_BYTES else CPU_TOKENS
        return max(least, CPU_LOGITS_BYTES // (4 * V))
    return (SCARCE_LOGITS_BYTES if is_scarce else LOGITS_BYTES) // (4 * V)


def _choose_chunk(length: int, fitting: int) -> int:
    """Return the length of a chunk: the largest divisor of `length` that is at most `fitting`.

    If this divisor is less than an eighth of both arguments, as for a prime `length`, return the
    smallest divisor above `fitting` instead.
    """
    divisors = [size for size in range(1, length + 1) if length % size == 0]
    chunk = max(size for size in divisors if size <= fitting)
    if 8 * chunk < min(fitting, length):
        chunk = min(size for size in divisors if size > fitting)
    return chunk


class _Head(NamedTuple):
    """The static part of `head_loss`: everything but its arrays."""

    # A function of logits, rows, and the arrays that it closed over.
    logits_loss: Callable[..., tuple[Array, Tree]]
    dtype: jnp.dtype  # dtype of the operands of products
    logits_dtype: jnp.dtype
    variants: Variants
    chunk: int  # number of positions per sequence whose logits exist at a time

    def cast(self, table: Array) -> Array:
        """Return the table in the dtype of the products' operands."""
        # Without the barrier, XLA:TPU would repeat the cast in each product, and a 124M step on a
        # v5e would take an estimated 5 % longer.
        return jax.lax.optimization_barrier(table.astype(self.dtype))

    @property
    def gradient_scale(self) -> float:
        """The factor that scales the gradients of logits, so that float16 can represent them."""
        return 1024.0 if self.dtype == jnp.float16 else 1.0

    def logits(self, hidden: Array, table: Array) -> Array:
        """Return float32 logits `[B, T, V]`, rounded to `logits_dtype`."""
        stored = dot(hidden, table, (2,), (1,), self.logits_dtype)
        return stored.astype(jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _loss(
    hidden: Array,
    stored: Array,
    rows: Batch,
    closed_over: list[Array],
    zeros: tuple[Array, Tree],
    head: _Head,
) -> tuple[Array, Tree]:
    table = head.cast(stored)

    def add_chunk(sums, chunk):
        hidden, rows = chunk
        new = head.logits_loss(head.logits(hidden, table), rows, *closed_over)
        return jax.tree.map(jnp.add, sums, new), None

    return _scan(add_chunk, zeros, (hidden, rows), head.chunk)[0]


def _loss_fwd(hidden, stored, rows, closed_over, zeros, head):
    table = head.cast(stored)
    result = head.dtype if head.variants.narrow_results else jnp.float32
    # XLA:CPU cannot compute the transposed product of 16-bit operands.
    is_transposed = head.variants.transposed_head_gradient and head.dtype == jnp.float32

    def add_chunk(sums, chunk):
        losses, dtable, dclosed = sums
        hidden, rows = chunk

        def loss(logits, closed_over):
            return head.logits_loss(logits, rows, *closed_over)

        derive = jax.value_and_grad(loss, (0, 1), has_aux=True)
        new, (dlogits, dnew) = derive(head.logits(hidden, table), closed_over)
        dlogits = (head.gradient_scale * dlogits).astype(head.dtype)
        factors = (hidden, dlogits) if is_transposed else (dlogits, hidden)
        dtable += dot(*factors, (0, 1), (0, 1))
        dhidden = dot(dlogits, table, (2,), (0,), result)
        losses, dclosed = jax.tree.map(jnp.add, (losses, dclosed), (new, dnew))
        return (losses, dtable, dclosed), dhidden.astype(head.dtype)

    shape = table.shape[::-1] if is_transposed else table.shape
    dclosed = jax.tree.map(jnp.zeros_like, closed_over)
    sums = (zeros, jnp.zeros(shape, jnp.float32), dclosed)
    sums, dhidden = _scan(add_chunk, sums, (hidden, rows), head.chunk)
    losses, dtable, dclosed = sums
    # Without the barrier, XLA would transpose both factors if there is a single chunk
    # (docs/performance.md, XLA:CPU note 9).
    if is_transposed:
        dtable = jax.lax.optimization_barrier(dtable).T
    dtable = (dtable / head.gradient_scale).astype(stored.dtype)
    return losses, (dhidden, dtable, dclosed)


def _loss_bwd(head, gradients, dlosses):
    scale, _ = dlosses  # the second result, sums that are logged, has no gradient
    dhidden, *others = gradients
    dhidden = (dhidden * (scale / head.gradient_scale)).astype(dhidden.dtype)
    dtable, dclosed = jax.tree.map(lambda x: (x * scale).astype(x.dtype), others)
    # Without the barrier, XLA:TPU would fuse the derivative of the final norm into the head's
    # product, which would then take twice as long.
    return jax.lax.optimization_barrier(dhidden), dtable, None, dclosed, None


_loss.defvjp(_loss_fwd, _loss_bwd)


def _scan(add_chunk, sums, positions, chunk):
    """Scan `add_chunk(sums, part) -> (sums, outputs)` over parts of `chunk` positions each.

    `positions` is a tree of arrays `[B, T, ...]`, of which a part is a slice along T. `sums` holds
    the initial sums. Return the final sums, and the outputs of all parts, joined to `[B, T, ...]`.
    A scan adds up terms as they are computed, but XLA:CPU would store all terms of an unrolled loop
    (docs/performance.md, XLA:CPU note 5).
    """

    def split(x):
        x = x.reshape(len(x), -1, chunk, *x.shape[2:])
        return jnp.swapaxes(x, 0, 1)

    def join(x):
        x = jnp.swapaxes(x, 0, 1)
        return x.reshape(len(x), -1, *x.shape[3:])

    if jax.tree.leaves(positions)[0].shape[1] == chunk:
        return add_chunk(sums, positions)
    sums, outputs = jax.lax.scan(add_chunk, sums, jax.tree.map(split, positions))
    return sums, jax.tree.map(join, outputs)


@jax.custom_vjp
def one_pass_log_sum_exp(logits: Array) -> Array:
    """Return the log of softmax's normaliser, `[B, T]`, for float32 logits `[B, T, V]`.

    The sum of exponentials is computed in one pass over the logits, and is rescaled whenever the
    maximum grows (Milakov and Gimelshein 2018, arXiv 1805.02867).
    """
    return _one_pass_fwd(logits)[0]


def _one_pass_fwd(logits):
    def join(one, other):
        top, total = one
        top_2, total_2 = other
        # The sum with the lower maximum is multiplied by this factor.
        scale = jnp.exp(-jnp.abs(top - top_2))
        sums = jnp.where(top > top_2, total + scale * total_2, scale * total + total_2)
        return jnp.maximum(top, top_2), sums

    least = jnp.float32(jnp.finfo(jnp.float32).min)
    start = (least, jnp.float32(0.0))
    ones = jnp.ones_like(logits)
    highest, total = jax.lax.reduce((logits, ones), start, join, (2,))
    return highest + jnp.log(total), (logits, highest, total)


def _one_pass_bwd(residuals, dy):
    logits, highest, total = residuals
    scale = (1.0 / total) * dy
    return (jnp.exp(logits - highest[..., None]) * scale[..., None],)


one_pass_log_sum_exp.defvjp(_one_pass_fwd, _one_pass_bwd)


def pad_vocab(table: Array, *, multiple: int, constrain: Callable[..., Array]) -> Array:
    """Return a table `[V, D]` with rows of zeros added, so that V is a multiple of `multiple`.

    `constrain` is the function with which the backend shards the padded table.

    If the head is the token embedding, the lookup of tokens and the head use the same padded array.
    Their gradients are then accumulated in the padded table without a copy.
    """
    padding = -len(table) % multiple
    # `jnp.pad` is called even if there is no padding. Otherwise the gradient would be the direct
    # result of a matrix product. XLA:CPU would then compute the gradient's norm by a sum over
    # windows (reduce-window), which takes ten times as long.
    padded = _pad_with_barrier(table, padding) if padding else _pad(table, padding)
    # The axis `tensor` splits the padded table in the same way as the table without padding.
    return constrain(padded, "rows", "table")


def look_up_padded(
    table: Array,
    tokens: Array,
    dtype: DTypeLike,
    *,
    look_up: LookUpFn,
    vocab_size: int,
) -> Array:
    """Return the rows `[B, T, D]` of tokens `[B, T]` in a table that `pad_vocab` returned.

    `look_up(table, tokens, dtype)` reads the rows. `vocab_size` is the number of rows before
    padding: a token whose id is `vocab_size` or more yields NaN, as in `plain.look_up`.
    """
    exists = (-vocab_size <= tokens) & (tokens < vocab_size)
    missing = jnp.iinfo(tokens.dtype).max
    return look_up(table, jnp.where(exists, tokens % vocab_size, missing), dtype)


def _pad(table, padding):
    return jnp.pad(table, ((0, padding), (0, 0)))


# The barrier makes XLA remove the padding where the gradient is read. Otherwise XLA would remove
# the padding from each term of the gradient, and copy all terms.
_pad_with_barrier = jax.custom_vjp(_pad, nondiff_argnums=(1,))
_pad_with_barrier.defvjp(
    lambda table, padding: (_pad(table, padding), None),
    lambda padding, _, dtable: (jax.lax.optimization_barrier(dtable)[:-padding],),
)
