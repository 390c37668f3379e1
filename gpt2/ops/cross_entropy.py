"""The output head and the cross-entropy loss as one operation, a chunk of positions at a time.

The logits `[B, T, V]` are the largest array of a training step. Here they exist for one chunk of
positions, and both gradients come from each chunk in the same pass (1.0 GB in place of 6.2 for 30
sequences of 1,024 tokens on a GPU; 124M on two cores takes a quarter longer without chunks).
"""

import dataclasses
from collections.abc import Callable, Hashable
from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from gpt2.ops import plain
from gpt2.ops.fsdp import Shard, Shards, gather_parameter
from gpt2.ops.linear import dot
from gpt2.ops.plain import Losses, Objective
from gpt2.ops.table import LookUp
from gpt2.ops.variants import Variants

# Bytes of float32 logits that exist at a time: 42,000 tokens with GPT-2's vocabulary. A step of
# 32,768 in four chunks takes 1.03 times as long on an H200, and holds 6.7 GiB less.
LOGITS_BYTES = 8 * 2**30
SCARCE_LOGITS_BYTES = 2**29  # where parameters are gathered by layer, memory counts
CPU_LOGITS_BYTES = 2**23  # a CPU is faster with what its caches hold
CPU_ROWS = 512  # at least: every chunk adds to the gradient of the whole table
LARGE_TABLE_BYTES = 2**25  # which no cache holds: adding takes longer
LARGE_TABLE_ROWS = 2048  # in place of CPU_ROWS


def cross_entropy(
    hidden: Array,
    table: Array | Shard,
    targets: Array,
    objective: Objective,
    *,
    variants: Variants,
    rows: int,
) -> Losses:
    """Computes `plain.cross_entropy`, with the logits of so many `rows` at a time."""
    chex.assert_rank([hidden, targets], 3)
    chex.assert_type(targets, int)
    chex.assert_equal_shape_prefix([targets, hidden], 2)  # fewer would broadcast
    array, shards = table if isinstance(table, Shard) else (table, None)
    chex.assert_axis_dimension_gteq(array, 0, objective.vocab_size)
    terms = (*objective.logit_terms, *objective.loss_terms)
    if terms and not all(_is_static(term) for term in terms):
        whole = gather_parameter(array, shards, objective.dtype) if shards else array
        return plain.cross_entropy(hidden, whole, targets, objective)
    B, T, _ = targets.shape
    fitting = max(1, rows // B)
    # A power of two fills the tiles of matrix units, and divides the usual lengths.
    chunk = T if fitting >= T else 1 << fitting.bit_length() - 1
    static = objective._replace(weights=())
    head = _Head(static, variants, chunk, shards)
    hidden = hidden.astype(objective.dtype)
    return _losses(hidden, array, targets, objective.weights, head)


def _is_static(term: object) -> bool:
    """Returns whether a term holds numbers alone: of arrays this kernel gives no derivative."""
    if not (dataclasses.is_dataclass(term) and isinstance(term, Hashable)):
        return False
    return all(isinstance(value, float | int) for value in vars(term).values())


def rows_at_once(platform: str, table: tuple[int, int], *, is_scarce: bool) -> int:
    """Returns for how many rows logits exist at a time, by a head's shape; see above."""
    V, D = table
    if platform == "cpu":
        least = LARGE_TABLE_ROWS if 4 * V * D > LARGE_TABLE_BYTES else CPU_ROWS
        return max(least, CPU_LOGITS_BYTES // (4 * V))
    return (SCARCE_LOGITS_BYTES if is_scarce else LOGITS_BYTES) // (4 * V)


class _Head(NamedTuple):
    """What is computed of hidden states, a table and targets, without arrays."""

    objective: Objective
    variants: Variants
    chunk: int  # of T positions have logits at one time
    shards: Shards | None

    def whole(self, table: Array) -> Array:
        """Returns all rows of a table in the type of operands."""
        table = table.astype(self.objective.dtype)
        if self.shards:
            table = self.shards.gather(table)
        # Or XLA:TPU casts in each product (v5e 5 %).
        return jax.lax.optimization_barrier(table)

    def logits(self, hidden: Array, table: Array) -> Array:
        """Returns logits `[B, T, V]`, float32, before their terms."""
        stored = dot(hidden, table, (2,), (1,), self.objective.logits_dtype)
        return stored.astype(jnp.float32)

    def losses(
        self, logits: Array, targets: Array, weights: tuple[Array | float, ...]
    ) -> Losses:
        """Returns what logits lose."""
        objective = self.objective._replace(weights=weights)
        log_sum_exp = _kept_log_sum_exp
        if self.variants.one_pass:
            log_sum_exp = _one_pass_log_sum_exp
        return plain.sum_losses(logits, targets, objective, log_sum_exp)

    def none(self, targets: Array) -> Losses:
        """Returns the losses of no position."""
        K = targets.shape[2]
        added = jnp.zeros((len(self.objective.loss_terms), K))
        return Losses(jnp.zeros(()), jnp.zeros(K), added)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _losses(
    hidden: Array,
    stored: Array,
    targets: Array,
    weights: tuple[Array | float, ...],
    head: _Head,
) -> Losses:
    table = head.whole(stored)

    def add_chunk(found, rows):
        hidden, targets = rows
        losses = head.losses(head.logits(hidden, table), targets, weights)
        return jax.tree.map(jnp.add, found, losses), None

    return _scan(add_chunk, head.none(targets), hidden, targets, head.chunk)[0]


def _losses_fwd(hidden, stored, targets, weights, head):
    table = head.whole(stored)
    dtype = table.dtype
    result = dtype if head.variants.narrow_results else jnp.float32
    # XLA:CPU lacks it in 16 bits.
    by_width = head.variants.head_by_width and dtype == jnp.float32

    def add_chunk(sums, rows):
        found, dtable = sums
        hidden, targets = rows

        def lose(logits):
            losses = head.losses(logits, targets, weights)
            return losses.total, losses

        dlogits, losses = jax.grad(lose, has_aux=True)(head.logits(hidden, table))
        dlogits = dlogits.astype(dtype)
        factors = (hidden, dlogits) if by_width else (dlogits, hidden)
        dtable += dot(*factors, (0, 1), (0, 1))
        dhidden = dot(dlogits, table, (2,), (0,), result)
        found = jax.tree.map(jnp.add, found, losses)
        return (found, dtable), dhidden.astype(dtype)

    shape = table.shape[::-1] if by_width else table.shape
    sums = head.none(targets), jnp.zeros(shape, jnp.float32)
    (losses, dtable), dhidden = _scan(add_chunk, sums, hidden, targets, head.chunk)
    # Without the barrier, XLA would transpose both factors of a single chunk.
    if by_width:
        dtable = jax.lax.optimization_barrier(dtable).T
    if head.shards:
        dtable = head.shards.scatter(dtable)
    return losses, (dhidden, dtable.astype(stored.dtype))


def _losses_bwd(head, gradients, dlosses):
    dhidden, dtable = ((x * dlosses.total).astype(x.dtype) for x in gradients)
    # XLA:TPU would take twice as long over the product if the derivative of a norm joined it.
    return jax.lax.optimization_barrier(dhidden), dtable, None, None


_losses.defvjp(_losses_fwd, _losses_bwd)


def _scan(add_chunk, sums, hidden, targets, chunk):
    """Scans over chunks of positions (docs/performance.md, XLA:CPU note 7): sums, `[B, T, ...]`."""
    B, T, D = hidden.shape
    if chunk == T:
        return add_chunk(sums, (hidden, targets))
    padding = -T % chunk
    filled = ((0, 0), (0, padding), (0, 0))
    hidden = jnp.pad(hidden, filled)
    targets = jnp.pad(targets, filled, constant_values=-1)
    rows = (
        hidden.reshape(B, -1, chunk, D),
        targets.reshape(B, -1, chunk, targets.shape[2]),
    )
    rows = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), rows)
    sums, outputs = jax.lax.scan(add_chunk, sums, rows)
    if outputs is not None:
        outputs = jnp.swapaxes(outputs, 0, 1)
        outputs = outputs.reshape(B, -1, D)[:, :T]
    return sums, outputs


@jax.custom_vjp
def _kept_log_sum_exp(logits: Array) -> Array:
    """Computes `plain.log_sum_exp`, and keeps the exponentials for its derivative."""
    return _kept_fwd(logits)[0]


def _kept_fwd(logits):
    highest = logits.max(axis=-1, keepdims=True)
    exponentials = jnp.exp(logits - highest)  # stored: XLA:CPU note 8
    total = exponentials.sum(axis=-1, keepdims=True)
    return highest + jnp.log(total), (exponentials, total)


_kept_log_sum_exp.defvjp(
    _kept_fwd, lambda kept, dy: (kept[0] * ((1.0 / kept[1]) * dy),)
)


@jax.custom_vjp
def _one_pass_log_sum_exp(logits: Array) -> Array:
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
    highest, total = jax.lax.reduce((logits, jnp.ones_like(logits)), start, join, (2,))
    highest = highest[..., None]
    total = total[..., None]
    return highest + jnp.log(total), (logits, highest, total)


def _one_pass_bwd(kept, dy):
    logits, highest, total = kept
    return (jnp.exp(logits - highest) * ((1.0 / total) * dy),)


_one_pass_log_sum_exp.defvjp(_one_pass_fwd, _one_pass_bwd)


def pad_vocab(
    table: Array | Shard,
    *,
    multiple: int,
    constrain: Callable[..., Array],
) -> Array | Shard:
    """Returns a table `[V, D]` with rows of zeros up to a multiple.

    A program that looks up tokens and computes logits does both with the same such array: the two
    gradients add up in the padded table, and nothing copies them.
    """
    array, shards = table if isinstance(table, Shard) else (table, None)
    padding = -len(array) % multiple
    # By nothing too: XLA:CPU sums the squares of a gradient that comes straight from a product in
    # windows, which takes ten times as long.
    padded = _pad_apart(array, padding) if padding else _pad(array, padding)
    padded = constrain(padded, "rows", "table")  # as stored, by columns
    return Shard(padded, shards) if shards else padded


def look_up_padded(
    table: Array | Shard,
    tokens: Array,
    dtype: DTypeLike,
    *,
    look_up: LookUp,
    vocab_size: int,
) -> Array:
    """Looks up tokens in what `pad_vocab` returned: what the stored table lacks, it lacks too."""
    exists = (-vocab_size <= tokens) & (tokens < vocab_size)
    rows = len(table.array if isinstance(table, Shard) else table)
    return look_up(table, jnp.where(exists, tokens % vocab_size, rows), dtype)  # type: ignore[arg-type]


def _pad(table, padding):
    return jnp.pad(table, ((0, padding), (0, 0)))


# The barrier makes XLA cut off the padding where the gradient is read. It would else cut what adds
# up to the gradient, in copies.
_pad_apart = jax.custom_vjp(_pad, nondiff_argnums=(1,))
_pad_apart.defvjp(
    lambda table, padding: (_pad(table, padding), None),
    lambda padding, _, dtable: (jax.lax.optimization_barrier(dtable)[:-padding],),
)
