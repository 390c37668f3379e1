"""The output head and the cross-entropy loss as one operation.

The logits `[B, T, V]` are the largest array of a training step. Here they exist for one chunk of
positions at a time, and both gradients come from each chunk in the same pass.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from gpt2.ops.arrays import dot, result_type
from gpt2.ops.scores import soft_cap
from gpt2.ops.variants import variants
from gpt2.utils.platform import target

# Bytes of float32 logits that the loss computes at a time: 10,000 tokens with GPT-2's vocabulary.
LOGITS_BYTES = 2 * 2**30
SCARCE_LOGITS_BYTES = 2**29  # where parameters are gathered by layer, memory counts
CPU_LOGITS_BYTES = 2**23  # a CPU is faster with what its caches hold
CPU_ROWS = 512  # at least: every chunk adds to the gradient of the whole table
# which takes longer where no cache holds it
LARGE_TABLE_BYTES = 2**25
LARGE_TABLE_ROWS = 2048

IMPOSSIBLE = (
    -1e9
)  # the logit of padding: its exponential is 0; finite, so that 0 times it is 0


def cross_entropy(
    hidden: jax.Array,  # [B, T, D], the output of the last norm
    embedding: jax.Array,  # [V, D]; rows from `vocab_size` on are padding without probability
    targets: jax.Array,  # [B, T] int32, or [B, T, K]; -1 counts neither in the loss nor the count
    *,
    vocab_size: int,
    weights: Any = (),  # [K - 1], of all targets but the first, for the derivative
    logit_softcap: float = 0.0,  # c > 0: logits x become c tanh(x / c) (Gemma 2, 2024, section 2)
    z_loss: float = 0.0,  # weight of log(normaliser)^2 (PaLM, Chowdhery et al. 2022, section 5)
    label_smoothing: float = 0.0,  # a target's share for all tokens (Szegedy et al. 2016, sec. 7)
    dtype: DTypeLike
    | None = None,  # of the operands of products; that of `hidden` if not given
    logits_dtype: DTypeLike = jnp.float32,  # in which logits are stored
    chunk: int = 0,  # positions (of T) whose logits exist at one time; 0 for all of them
    shards: Any = None,  # `gpt2.parallel.fsdp.Shards`, if `embedding` is a shard
) -> tuple[jax.Array, jax.Array]:
    """Sums the negative log-likelihood of the targets under `softmax(hidden @ embedding^T)`.

    Returns the sum, in nats, and the number of targets, both float32, each `[K]` if there are K for
    each position. Softmax and sums are float32. The derivative of the first sum is that of all of
    them, weighted; that of the others is 0.
    """
    chex.assert_rank(hidden, 3)
    chex.assert_rank(targets, {2, 3})
    chex.assert_equal_shape_prefix([targets, hidden], 2)  # fewer would broadcast
    chex.assert_type(targets, int)
    shape = shards.whole_shape(embedding.shape) if shards else embedding.shape
    chex.assert_equal(shape[1:], hidden.shape[2:])
    chex.assert_axis_dimension_gteq(embedding, 0, vocab_size)
    dtype = jnp.dtype(dtype or hidden.dtype)
    if target().plain and shards is None:
        how: dict[str, Any] = dict(vocab_size=vocab_size, dtype=dtype, weights=weights)
        how |= dict(
            logit_softcap=logit_softcap, z_loss=z_loss, label_smoothing=label_smoothing
        )
        return cross_entropy_reference(hidden, embedding, targets, **how)
    count = (targets >= 0).sum((0, 1), dtype=jnp.float32)
    terms = _Terms(
        vocab_size, logit_softcap, z_loss, label_smoothing, jnp.dtype(logits_dtype)
    )
    each = (
        hidden.astype(dtype),
        embedding,
        targets.reshape(*targets.shape[:2], -1),
        weights,
    )
    return _loss_sums(*each, terms, dtype, chunk, shards).reshape(count.shape), count


def positions_per_chunk(B: int, T: int, table: tuple[int, ...], is_scarce: bool) -> int:
    """Returns the `chunk` of `cross_entropy` for targets `[B, T]` and a table of a shape."""
    if target().platform == "cpu":
        least = (
            LARGE_TABLE_ROWS if 4 * math.prod(table) > LARGE_TABLE_BYTES else CPU_ROWS
        )
        rows = max(least, CPU_LOGITS_BYTES // (4 * table[0]))
    else:
        rows = (SCARCE_LOGITS_BYTES if is_scarce else LOGITS_BYTES) // (4 * table[0])
    fitting = max(1, rows // B)
    # A power of two fills the tiles of matrix units, and divides the usual lengths.
    return 0 if fitting >= T else 1 << fitting.bit_length() - 1


def cross_entropy_reference(hidden, embedding, targets, *, dtype, weights=(), **losses):
    """Computes `cross_entropy` with all logits at once and the derivative left to JAX."""
    terms = _Terms(**losses)
    embedding = embedding[: terms.vocab_size].astype(dtype)
    logits = soft_cap(
        dot(hidden.astype(dtype), embedding, (2,), (1,)), terms.logit_softcap
    )
    log_probs = jax.nn.log_softmax(logits)
    each = targets.reshape(*targets.shape[:2], -1)
    picked = jnp.take_along_axis(log_probs, jnp.maximum(each, 0), axis=-1)
    mean = log_probs.mean(axis=-1, keepdims=True)
    wanted = (1.0 - terms.label_smoothing) * picked + terms.label_smoothing * mean
    each_loss = (
        terms.z_loss * jax.nn.logsumexp(logits, axis=-1, keepdims=True) ** 2 - wanted
    )
    sums = jnp.where(each >= 0, each_loss, 0.0).sum((0, 1))
    total = _weigh(weights, sums[None, None])[0, 0]
    sums = jax.lax.stop_gradient(sums)
    sums = sums.at[0].add(total - jax.lax.stop_gradient(total))
    count = (targets >= 0).sum((0, 1), dtype=jnp.float32)
    return sums.reshape(count.shape), count


@dataclasses.dataclass(frozen=True)
class _Terms:
    """What is lost, as `cross_entropy` names it."""

    vocab_size: int
    logit_softcap: float = 0.0
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    logits_dtype: Any = jnp.float32

    def logits(self, hidden, embedding):
        """Returns the logits `[B, T, V]`, float32, padding masked out."""
        logits = dot(hidden, embedding, (2,), (1,), self.logits_dtype).astype(
            jnp.float32
        )
        logits = soft_cap(logits, self.logit_softcap)
        is_padded = self.vocab_size < len(embedding)
        return (
            jnp.where(self._exists(logits), logits, IMPOSSIBLE) if is_padded else logits
        )

    def _exists(self, logits):
        """Returns which tokens exist, `[1, 1, V]`."""
        return (
            jax.lax.broadcasted_iota(jnp.int32, (1, 1, logits.shape[2]), 2)
            < self.vocab_size
        )

    def losses(self, logits, normaliser, highest, hidden, embedding, targets):
        """Returns the losses `[K]`, summed over positions that have a target."""
        target_logits = self._target_logits(logits, hidden, embedding, targets)
        log_normaliser = highest + jnp.log(normaliser)
        losses = log_normaliser - target_logits
        if self.label_smoothing:
            mean = jnp.where(self._exists(logits), logits, 0.0).sum(
                axis=-1, keepdims=True
            )
            losses += self.label_smoothing * (target_logits - mean / self.vocab_size)
        if self.z_loss:
            losses += self.z_loss * log_normaliser**2
        return jnp.where(targets >= 0, losses, 0.0).sum((0, 1))

    def _target_logits(self, logits, hidden, embedding, targets):
        """Returns the targets' logits `[B, T, K]`, float32, from rows of the table: no pass over V.

        Where the product or its result was rounded they are read from the logits: an exact one
        beside sums of rounded ones would give another loss, even a negative one.
        """
        is_rounded = hidden.dtype == jnp.float32 and variants().rounds_float32
        if is_rounded or self.logits_dtype != jnp.float32:
            return jnp.where(_is_target(logits, targets), logits[:, :, None], 0.0).sum(
                axis=-1
            )
        rows = jnp.take(embedding, jnp.maximum(targets, 0), axis=0).astype(hidden.dtype)
        logits = jnp.sum(hidden.astype(jnp.float32)[:, :, None] * rows, axis=-1)
        return soft_cap(logits, self.logit_softcap)

    def derivative(self, logits, exponentials, normaliser, highest, targets, weights):
        """Returns the derivative of `losses` by the logits before their soft cap, `[B, T, V]`."""
        weigh = partial(_weigh, weights)
        share = weigh(targets[..., None] >= 0)
        wanted = weigh(_is_target(logits, targets))
        factor = 1.0 / normaliser
        if self.z_loss:
            factor *= 1.0 + 2.0 * self.z_loss * (highest + jnp.log(normaliser))
        dlogits = (
            exponentials * (factor * share) - (1.0 - self.label_smoothing) * wanted
        )
        if self.label_smoothing:
            dlogits -= (
                self.label_smoothing / self.vocab_size * share * self._exists(logits)
            )
        if self.logit_softcap:
            dlogits *= 1.0 - (logits / self.logit_softcap) ** 2
        return dlogits


def _is_target(logits, targets):
    """A comparison in place of a scatter: it joins a pass over the logits, and splits over V."""
    return (
        jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, logits.shape[2]), 3)
        == targets[..., None]
    )


def _weigh(weights, each):
    """Returns the weighted sum of `each`, `[B, T, K, ...]`, over K; the first one weighs 1."""
    others = range(1, each.shape[2])
    return sum(
        (weights[k - 1] * each[:, :, k] for k in others),
        each[:, :, 0].astype(jnp.float32),
    )


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _loss_sums(hidden, embedding, targets, weights, terms, dtype, chunk, shards):
    table, rows_of = _whole(embedding, dtype, shards)

    def add_chunk(losses, rows):
        hidden, targets = rows
        logits = terms.logits(hidden, table)
        _, normaliser, highest = _softmax(logits)
        return losses + terms.losses(
            logits, normaliser, highest, hidden, rows_of, targets
        ), None

    return _scan(add_chunk, jnp.zeros(targets.shape[2]), hidden, targets, chunk)[0]


def _whole(embedding, dtype, shards):
    """Returns all rows in `dtype`, and an array to take single rows from: cheapest as stored."""
    table = (
        shards.gather(embedding.astype(dtype)) if shards else embedding.astype(dtype)
    )
    table = jax.lax.optimization_barrier(
        table
    )  # or XLA:TPU casts inside of each product (v5e 5 %)
    return table, table if shards else embedding


def _loss_sums_fwd(hidden, embedding, targets, weights, terms, dtype, chunk, shards):
    table, rows_of = _whole(embedding, dtype, shards)
    result = result_type(dtype)

    def add_chunk(sums, rows):
        losses, dembedding = sums
        hidden, targets = rows
        logits = terms.logits(hidden, table)
        exponentials, *scale = _softmax(logits)
        losses += terms.losses(logits, *scale, hidden, rows_of, targets)
        dlogits = terms.derivative(
            logits, exponentials, *scale, targets, weights
        ).astype(dtype)
        factors = (hidden, dlogits) if by_width else (dlogits, hidden)
        dembedding += dot(*factors, (0, 1), (0, 1))
        return (losses, dembedding), dot(dlogits, table, (2,), (0,), result).astype(
            dtype
        )

    by_width = (
        variants().head_by_width and dtype == jnp.float32
    )  # XLA:CPU lacks it in 16 bits
    shape = table.shape[::-1] if by_width else table.shape
    sums = jnp.zeros(targets.shape[2]), jnp.zeros(shape, jnp.float32)
    (losses, dembedding), dhidden = _scan(add_chunk, sums, hidden, targets, chunk)
    if (
        by_width
    ):  # without the barrier, XLA would transpose both factors of a single chunk
        dembedding = jax.lax.optimization_barrier(dembedding).T
    dembedding = shards.scatter(dembedding) if shards else dembedding
    return losses, (dhidden, dembedding.astype(embedding.dtype))


def _loss_sums_bwd(terms, dtype, chunk, shards, gradients, dlosses):
    dhidden, dembedding = ((x * dlosses[0]).astype(x.dtype) for x in gradients)
    # XLA:TPU would take twice as long over the product if the derivative of a norm joined it.
    return jax.lax.optimization_barrier(dhidden), dembedding, None, None


_loss_sums.defvjp(_loss_sums_fwd, _loss_sums_bwd)


def _scan(add_chunk, sums, hidden, targets, chunk):
    """Scans over chunks of positions (docs/performance.md, XLA:CPU note 7): sums, `[B, T, ...]`."""
    B, T, D = hidden.shape
    if not chunk or chunk >= T:
        return add_chunk(sums, (hidden, targets))
    padding = -T % chunk
    hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, padding), (0, 0)), constant_values=-1)
    rows = (
        hidden.reshape(B, -1, chunk, D),
        targets.reshape(B, -1, chunk, targets.shape[2]),
    )
    rows = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), rows)
    sums, outputs = jax.lax.scan(add_chunk, sums, rows)
    if outputs is not None:
        outputs = jnp.swapaxes(outputs, 0, 1).reshape(B, -1, D)[:, :T]
    return sums, outputs


def _softmax(logits):
    """Returns exponentials `[B, T, V]`, their sums and the logits' maximum `[B, T, 1]`."""
    if (
        not variants().one_pass
    ):  # stored once, for the sum and the gradient: XLA:CPU note 8
        highest = logits.max(axis=-1, keepdims=True)
        exponentials = jnp.exp(logits - highest)
        return exponentials, exponentials.sum(axis=-1, keepdims=True), highest

    def join(
        one, other
    ):  # a sum is scaled when the maximum grows (Milakov and Gimelshein 2018)
        (top, total), (top_2, total_2) = one, other
        scale = jnp.exp(-jnp.abs(top - top_2))  # of the sum with the lower maximum
        sums = jnp.where(top > top_2, total + scale * total_2, scale * total + total_2)
        return jnp.maximum(top, top_2), sums

    ones = jnp.ones_like(logits)
    least = jnp.float32(jnp.finfo(jnp.float32).min)
    sums = jax.lax.reduce((logits, ones), (least, jnp.float32(0.0)), join, (2,))
    highest, normaliser = (x[..., None] for x in sums)
    return jnp.exp(logits - highest), normaliser, highest
