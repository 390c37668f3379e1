"""The output head and a loss of its logits as one operation, a chunk of positions at a time.

The logits `[B, T, V]` are the largest array of a training step. Here they exist for one chunk of
positions, and both gradients come from each chunk in the same pass (1.0 GB in place of 6.2 for 30
sequences of 1,024 tokens on a GPU; 124M on two cores takes a quarter longer without chunks).
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
from gpt2.ops.table import LookUp
from gpt2.ops.variants import Variants
from gpt2.utils.trees import Batch, Tree

# Bytes of float32 logits that exist at a time: 42,000 tokens with GPT-2's vocabulary. A step of
# 32,768 in four chunks takes 1.03 times as long on an H200, and holds 6.7 GiB less.
LOGITS_BYTES = 8 * 2**30
SCARCE_LOGITS_BYTES = 2**29  # where parameters are gathered by layer, memory counts
CPU_LOGITS_BYTES = 2**23  # a CPU is faster with what its caches hold
CPU_ROWS = 512  # at least: every chunk adds to the gradient of the whole table
LARGE_TABLE_BYTES = 2**25  # which no cache holds: adding takes longer
LARGE_TABLE_ROWS = 2048  # in place of CPU_ROWS


def head_loss(
    loss: LogitsLoss,
    hidden: Array,
    table: Array,
    rows: Batch,
    *,
    dtype: DTypeLike,
    logits_dtype: DTypeLike = jnp.float32,
    variants: Variants,
    num_rows: int,
) -> tuple[Array, Tree]:
    """Computes `plain.head_loss`, with the logits of so many rows at a time."""
    B, T, _ = hidden.shape
    chunk = _choose_chunk(T, max(1, num_rows // B))
    logits = jax.ShapeDtypeStruct((B, chunk, len(table)), jnp.float32)
    some = jax.eval_shape(partial(jax.tree.map, lambda x: x[:, :chunk]), rows)
    # Numbers to learn that the loss brings along become arguments, and get a derivative.
    loss, numbers = jax.closure_convert(loss, logits, some)
    sums = jax.eval_shape(loss, logits, some, *numbers)
    nothing = jax.tree.map(jnp.zeros_like, sums)
    dtype = jnp.dtype(dtype)
    head = _Head(loss, dtype, jnp.dtype(logits_dtype), variants, chunk)
    return _loss(hidden.astype(dtype), table, rows, numbers, nothing, head)


def rows_at_once(platform: str, table: tuple[int, int], *, is_scarce: bool) -> int:
    """Returns for how many rows logits exist at a time, by a head's shape; see above."""
    V, D = table
    if platform == "cpu":
        least = LARGE_TABLE_ROWS if 4 * V * D > LARGE_TABLE_BYTES else CPU_ROWS
        return max(least, CPU_LOGITS_BYTES // (4 * V))
    return (SCARCE_LOGITS_BYTES if is_scarce else LOGITS_BYTES) // (4 * V)


def _choose_chunk(length: int, fitting: int) -> int:
    """Returns the largest part of a length that fits; the least larger one if that is tiny."""
    parts = [size for size in range(1, length + 1) if length % size == 0]
    chunk = max(size for size in parts if size <= fitting)
    if 8 * chunk < min(fitting, length):
        chunk = min(size for size in parts if size > fitting)
    return chunk


class _Head(NamedTuple):
    """How a loss follows from hidden states, a table and rows."""

    loss: Callable[..., tuple[Array, Tree]]  # of logits, rows and numbers
    dtype: jnp.dtype  # of operands
    logits_dtype: jnp.dtype
    variants: Variants
    chunk: int  # of T positions have logits at one time

    def cast(self, table: Array) -> Array:
        """Returns a table in the type of operands."""
        # Or XLA:TPU casts in each product (v5e 5 %).
        return jax.lax.optimization_barrier(table.astype(self.dtype))

    @property
    def boost(self) -> float:
        """By how much derivatives are larger than they are: float16 has no small numbers."""
        return 1024.0 if self.dtype == jnp.float16 else 1.0

    def logits(self, hidden: Array, table: Array) -> Array:
        """Returns logits `[B, T, V]`, float32."""
        stored = dot(hidden, table, (2,), (1,), self.logits_dtype)
        return stored.astype(jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _loss(
    hidden: Array,
    stored: Array,
    rows: Batch,
    numbers: list[Array],
    nothing: tuple[Array, Tree],
    head: _Head,
) -> tuple[Array, Tree]:
    table = head.cast(stored)

    def add_chunk(found, chunk):
        hidden, rows = chunk
        more = head.loss(head.logits(hidden, table), rows, *numbers)
        return jax.tree.map(jnp.add, found, more), None

    return _scan(add_chunk, nothing, (hidden, rows), head.chunk)[0]


def _loss_fwd(hidden, stored, rows, numbers, nothing, head):
    table = head.cast(stored)
    result = head.dtype if head.variants.narrow_results else jnp.float32
    # XLA:CPU lacks it in 16 bits.
    by_width = head.variants.head_by_width and head.dtype == jnp.float32

    def add_chunk(sums, chunk):
        found, dtable, dnumbers = sums
        hidden, rows = chunk

        def loss(logits, numbers):
            return head.loss(logits, rows, *numbers)

        derive = jax.value_and_grad(loss, (0, 1), has_aux=True)
        of_chunk, (dlogits, more) = derive(head.logits(hidden, table), numbers)
        dlogits = (head.boost * dlogits).astype(head.dtype)
        factors = (hidden, dlogits) if by_width else (dlogits, hidden)
        dtable += dot(*factors, (0, 1), (0, 1))
        dhidden = dot(dlogits, table, (2,), (0,), result)
        found, dnumbers = jax.tree.map(jnp.add, (found, dnumbers), (of_chunk, more))
        return (found, dtable, dnumbers), dhidden.astype(head.dtype)

    shape = table.shape[::-1] if by_width else table.shape
    sums = (
        nothing,
        jnp.zeros(shape, jnp.float32),
        jax.tree.map(jnp.zeros_like, numbers),
    )
    sums, dhidden = _scan(add_chunk, sums, (hidden, rows), head.chunk)
    found, dtable, dnumbers = sums
    # Without the barrier, XLA would transpose both factors of a single chunk.
    if by_width:
        dtable = jax.lax.optimization_barrier(dtable).T
    dtable = (dtable / head.boost).astype(stored.dtype)
    return found, (dhidden, dtable, dnumbers)


def _loss_bwd(head, gradients, dfound):
    scale, _ = dfound
    dhidden, *others = gradients
    dhidden = (dhidden * (scale / head.boost)).astype(dhidden.dtype)
    dtable, dnumbers = jax.tree.map(lambda x: (x * scale).astype(x.dtype), others)
    # XLA:TPU would take twice as long over the product if the derivative of a norm joined it.
    return jax.lax.optimization_barrier(dhidden), dtable, None, dnumbers, None


_loss.defvjp(_loss_fwd, _loss_bwd)


def _scan(add_chunk, sums, positions, chunk):
    """Scans over chunks of positions (docs/performance.md, XLA:CPU note 5): sums, `[B, T, ...]`.

    `positions` are a tree of arrays `[B, T, ...]`.
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
    """Computes `plain.log_sum_exp`, and scales a sum when the maximum grows.

    Milakov and Gimelshein 2018, arXiv 1805.02867.
    """
    return _one_pass_fwd(logits)[0]


def _one_pass_fwd(logits):
    def join(one, other):
        top, total = one
        top_2, total_2 = other
        scale = jnp.exp(-jnp.abs(top - top_2))  # of the sum with the lower maximum
        sums = jnp.where(top > top_2, total + scale * total_2, scale * total + total_2)
        return jnp.maximum(top, top_2), sums

    least = jnp.float32(jnp.finfo(jnp.float32).min)
    start = (least, jnp.float32(0.0))
    ones = jnp.ones_like(logits)
    highest, total = jax.lax.reduce((logits, ones), start, join, (2,))
    return highest + jnp.log(total), (logits, highest, total)


def _one_pass_bwd(kept, dy):
    logits, highest, total = kept
    share = (1.0 / total) * dy
    return (jnp.exp(logits - highest[..., None]) * share[..., None],)


one_pass_log_sum_exp.defvjp(_one_pass_fwd, _one_pass_bwd)


def pad_vocab(table: Array, *, multiple: int, constrain: Callable[..., Array]) -> Array:
    """Returns a table `[V, D]` with rows of zeros up to a multiple.

    A program that looks up tokens and computes logits does both with the same such array: the two
    gradients add up in the padded table, and nothing copies them.
    """
    padding = -len(table) % multiple
    # By nothing too: XLA:CPU sums the squares of a gradient that comes straight from a product in
    # windows, which takes ten times as long.
    padded = _pad_apart(table, padding) if padding else _pad(table, padding)
    return constrain(padded, "rows", "table")  # as stored, by columns


def look_up_padded(
    table: Array,
    tokens: Array,
    dtype: DTypeLike,
    *,
    look_up: LookUp,
    vocab_size: int,
) -> Array:
    """Looks up tokens in what `pad_vocab` returned: what the stored table lacks, it lacks too."""
    exists = (-vocab_size <= tokens) & (tokens < vocab_size)
    nowhere = jnp.iinfo(tokens.dtype).max
    return look_up(table, jnp.where(exists, tokens % vocab_size, nowhere), dtype)


def _pad(table, padding):
    return jnp.pad(table, ((0, padding), (0, 0)))


# The barrier makes XLA cut off the padding where the gradient is read. It would else cut what adds
# up to the gradient, in copies.
_pad_apart = jax.custom_vjp(_pad, nondiff_argnums=(1,))
_pad_apart.defvjp(
    lambda table, padding: (_pad(table, padding), None),
    lambda padding, _, dtable: (jax.lax.optimization_barrier(dtable)[:-padding],),
)
