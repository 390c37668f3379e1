"""The output head and the cross-entropy loss as one operation, a chunk of positions at a time.

The logits `[B, T, V]` are the largest array of a training step. Here they exist for one chunk of
positions, and both gradients come from each chunk in the same pass (1.0 GB in place of 6.2 for 30
sequences of 1,024 tokens on a GPU; 124M on two cores takes a quarter longer without chunks).
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
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
from gpt2.ops.plain import Objective
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

# The logit of padding: its exponential is 0; finite, so that 0 times it is 0.
IMPOSSIBLE = -1e9


def cross_entropy(
    hidden: Array,
    table: Array | Shard,
    targets: Array,
    objective: Objective,
    *,
    variants: Variants,
    rows: int,
) -> tuple[Array, Array]:
    """Computes `plain.cross_entropy`, with the logits of so many `rows` at a time."""
    chex.assert_rank([hidden, targets], 3)
    chex.assert_equal_shape_prefix([targets, hidden], 2)  # fewer would broadcast
    array, shards = table if isinstance(table, Shard) else (table, None)
    chex.assert_axis_dimension_gteq(array, 0, objective.vocab_size)
    terms = (*objective.logit_terms, *objective.loss_terms)
    if terms and not all(_is_static(term) for term in terms):
        whole = gather_parameter(array, shards, objective.dtype) if shards else array
        return plain.cross_entropy(hidden, whole, targets, objective)
    B, T, K = targets.shape
    fitting = max(1, rows // B)
    # A power of two fills the tiles of matrix units, and divides the usual lengths.
    chunk = T if fitting >= T else 1 << fitting.bit_length() - 1
    size = objective.vocab_size or len(array)
    static = objective._replace(weights=(), vocab_size=size)
    head = _Head(static, variants, chunk, shards)
    sums = _loss_sums(
        hidden.astype(objective.dtype), array, targets, objective.weights, head
    )
    return sums[:K], sums[K:].reshape(-1, K)


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

    def raw_logits(self, hidden: Array, table: Array) -> Array:
        """Returns logits `[B, T, V]`, float32, before their terms."""
        return dot(hidden, table, (2,), (1,), self.objective.logits_dtype).astype(
            jnp.float32
        )

    def change(self, logits: Array) -> Array:
        """Returns logits after their terms, padding masked out."""
        for term in self.objective.logit_terms:
            logits = term(logits)
        if self.objective.vocab_size == logits.shape[2]:
            return logits
        token = jax.lax.broadcasted_iota(jnp.int32, (1, 1, logits.shape[2]), 2)
        return jnp.where(token < self.objective.vocab_size, logits, IMPOSSIBLE)

    def target_logits(
        self, logits: Array, hidden: Array, stored: Array, targets: Array
    ) -> Array:
        """Returns the targets' logits `[B, T, K]`, float32, from rows of the table: no pass over V.

        Where the product or its result was rounded, or changed, they are read from the logits: an
        exact one beside sums of rounded ones would give another loss, even a negative one.
        """
        is_rounded = hidden.dtype == jnp.float32 and self.variants.rounds_float32
        is_rounded |= self.objective.logits_dtype != jnp.float32
        if is_rounded or self.objective.logit_terms:
            is_target = _is_target(logits, targets)
            return jnp.where(is_target, logits[:, :, None], 0.0).sum(axis=-1)
        rows = jnp.take(stored, jnp.maximum(targets, 0), axis=0)
        rows = rows.astype(hidden.dtype)
        hidden = hidden.astype(jnp.float32)
        return jnp.sum(hidden[:, :, None] * rows, axis=-1)

    def sums(
        self, logits: Array, log_normaliser: Array, target_logits: Array, targets: Array
    ) -> Array:
        """Returns the sums of losses by target `[K]`, then those of each term, `[K + terms K]`."""
        parts = [log_normaliser - target_logits]
        for term in self.objective.loss_terms:
            known = logits[..., : self.objective.vocab_size]
            part = term(known, log_normaliser, target_logits)
            parts.append(jnp.broadcast_to(part, targets.shape))
        parts[0] = sum(parts[1:], parts[0])
        return jnp.concatenate(
            [jnp.where(targets >= 0, x, 0.0).sum((0, 1)) for x in parts]
        )

    def derivative(
        self,
        logits: Array,
        softmax: "_Softmax",
        target_logits: Array,
        targets: Array,
        weights: Sequence[Array | float],
    ) -> Array:
        """Returns the derivative of the weighted losses by changed logits, `[B, T, V]`."""
        share = _weigh(weights, targets[..., None] >= 0)
        if not self.objective.loss_terms:
            factor = (1.0 / softmax.normaliser) * share
            at_targets = _weigh(weights, _is_target(logits, targets))
            return softmax.exponentials * factor - at_targets
        each = jnp.stack([jnp.float32(weight) for weight in (1.0, *weights)])
        wanted = jnp.where(targets >= 0, each, 0.0)

        def add_terms(logits, log_normaliser, target_logits):
            known = logits[..., : self.objective.vocab_size]
            parts = [
                term(known, log_normaliser, target_logits)
                for term in self.objective.loss_terms
            ]
            return jnp.broadcast_to(sum(parts), targets.shape)

        _, derive = jax.vjp(add_terms, logits, softmax.log_normaliser, target_logits)
        by_logits, by_normaliser, by_target = derive(wanted)
        factor = (1.0 / softmax.normaliser) * (share + by_normaliser)
        at_targets = _is_target(logits, targets) * (wanted - by_target)[..., None]
        return softmax.exponentials * factor - at_targets.sum(2) + by_logits


def _is_target(logits, targets):
    """A comparison in place of a scatter: it joins a pass over the logits, and splits over V."""
    shape = (1, 1, 1, logits.shape[2])
    tokens = jax.lax.broadcasted_iota(jnp.int32, shape, 3)
    return tokens == targets[..., None]


def _weigh(weights, each):
    """Returns the weighted sum of `each`, `[B, T, K, ...]`, over K; the first one weighs 1."""
    total = each[:, :, 0].astype(jnp.float32)
    for k in range(1, each.shape[2]):
        total = weights[k - 1] * each[:, :, k] + total
    return total


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _loss_sums(
    hidden: Array,
    stored: Array,
    targets: Array,
    weights: tuple[Array | float, ...],
    head: _Head,
) -> Array:
    table = head.whole(stored)
    rows_of = table if head.shards else stored

    def add_chunk(sums, rows):
        hidden, targets = rows
        logits = head.change(head.raw_logits(hidden, table))
        softmax = _softmax(logits, head.variants)
        target_logits = head.target_logits(logits, hidden, rows_of, targets)
        return sums + head.sums(
            logits, softmax.log_normaliser, target_logits, targets
        ), None

    return _scan(add_chunk, _no_sums(targets, head), hidden, targets, head.chunk)[0]


def _no_sums(targets, head):
    return jnp.zeros(targets.shape[2] * (1 + len(head.objective.loss_terms)))


def _loss_sums_fwd(hidden, stored, targets, weights, head):
    table = head.whole(stored)
    rows_of = table if head.shards else stored
    dtype = table.dtype
    result = dtype if head.variants.narrow_results else jnp.float32
    # XLA:CPU lacks it in 16 bits.
    by_width = head.variants.head_by_width and dtype == jnp.float32

    def add_chunk(sums, rows):
        losses, dtable = sums
        hidden, targets = rows
        logits, derive = jax.vjp(head.change, head.raw_logits(hidden, table))
        softmax = _softmax(logits, head.variants)
        target_logits = head.target_logits(logits, hidden, rows_of, targets)
        losses += head.sums(logits, softmax.log_normaliser, target_logits, targets)
        dlogits = head.derivative(logits, softmax, target_logits, targets, weights)
        if head.objective.logit_terms:
            (dlogits,) = derive(dlogits)
        dlogits = dlogits.astype(dtype)
        factors = (hidden, dlogits) if by_width else (dlogits, hidden)
        dtable += dot(*factors, (0, 1), (0, 1))
        dhidden = dot(dlogits, table, (2,), (0,), result)
        return (losses, dtable), dhidden.astype(dtype)

    shape = table.shape[::-1] if by_width else table.shape
    sums = _no_sums(targets, head), jnp.zeros(shape, jnp.float32)
    (losses, dtable), dhidden = _scan(add_chunk, sums, hidden, targets, head.chunk)
    # Without the barrier, XLA would transpose both factors of a single chunk.
    if by_width:
        dtable = jax.lax.optimization_barrier(dtable).T
    if head.shards:
        dtable = head.shards.scatter(dtable)
    return losses, (dhidden, dtable.astype(stored.dtype))


def _loss_sums_bwd(head, gradients, dlosses):
    dhidden, dtable = ((x * dlosses[0]).astype(x.dtype) for x in gradients)
    # XLA:TPU would take twice as long over the product if the derivative of a norm joined it.
    return jax.lax.optimization_barrier(dhidden), dtable, None, None


_loss_sums.defvjp(_loss_sums_fwd, _loss_sums_bwd)


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


class _Softmax(NamedTuple):
    """Exponentials `[B, T, V]` of logits less their maximum, their sums, that maximum."""

    exponentials: Array
    normaliser: Array
    highest: Array

    @property
    def log_normaliser(self) -> Array:
        """The log of the sum of the logits' exponentials."""
        return self.highest + jnp.log(self.normaliser)


def _softmax(logits: Array, variants: Variants) -> _Softmax:
    if variants.one_pass:
        return _softmax_in_one_pass(logits)
    highest = logits.max(axis=-1, keepdims=True)
    # Stored, for the sum and the gradient: XLA:CPU note 8.
    exponentials = jnp.exp(logits - highest)
    return _Softmax(exponentials, exponentials.sum(axis=-1, keepdims=True), highest)


def _softmax_in_one_pass(logits: Array) -> _Softmax:
    """Scales a sum when the maximum grows (Milakov and Gimelshein 2018)."""

    def join(one, other):
        top, total = one
        top_2, total_2 = other
        scale = jnp.exp(-jnp.abs(top - top_2))  # of the sum with the lower maximum
        sums = jnp.where(top > top_2, total + scale * total_2, scale * total + total_2)
        return jnp.maximum(top, top_2), sums

    least = jnp.float32(jnp.finfo(jnp.float32).min)
    start = (least, jnp.float32(0.0))
    highest, normaliser = jax.lax.reduce(
        (logits, jnp.ones_like(logits)), start, join, (2,)
    )
    highest = highest[..., None]
    return _Softmax(jnp.exp(logits - highest), normaliser[..., None], highest)


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
