"""Log-likelihoods of many texts of mixed lengths, by few compiled programs.

Requests are sorted into buckets by how many tokens they have and how many of those are scored,
padded to their bucket's numbers, and scored a batch of fixed shape at a time. Causal attention
keeps padding on the right out of every score.
"""

import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import track

from gpt2.errors import UserError
from gpt2.utils.buckets import SHORTEST, bucket

# On each device. Bounds the logits, 4 V bytes for each scored token, and what a batch that is not
# full wastes: a CPU is busy with few tokens already.
TOKENS_PER_BATCH = 8192
TOKENS_PER_CPU_BATCH = 512


@dataclasses.dataclass(frozen=True)
class Request:
    """A text, and which of its tokens are to be scored.

    Attributes:
        tokens: [T] int32, what the model reads.
        targets: [T] int32, the token after each; -1 where it is not scored.
        segments: [T] int32 or None; tokens see only those of their own segment.
    """

    tokens: np.ndarray
    targets: np.ndarray
    segments: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Score:
    """What the model thinks of a request.

    Attributes:
        log_prob: of all scored tokens, in nats.
        count: how many those are.
        greedy: whether each of them was the likeliest.
    """

    log_prob: float
    count: int
    greedy: bool


def continuation(context: Sequence[int], tokens: Sequence[int], context_length: int) -> Request:
    """Asks for the likelihood of `tokens` after `context`, of which the end is kept if need be.

    Raises:
        UserError: there is no context, or the tokens alone exceed `context_length`.
    """
    if not len(context) or not 0 < len(tokens) <= context_length:
        raise UserError(
            f"an example has {len(context)} tokens of context and {len(tokens)} to score",
            f"Give at least one of each, and at most {context_length} to score",
        )
    text = np.array([*context, *tokens], np.int32)[-context_length - 1 :]
    targets = text[1:].copy()
    targets[: -len(tokens)] = -1
    return Request(text[:-1], targets)


def windows(tokens: Sequence[int], context_length: int, stride: int) -> list[Request]:
    """Asks for every token but the first, by windows that move `stride` tokens at a time.

    Each window scores only what the one before has not, so that all but the first tokens have at
    least `context_length - stride` tokens of context.
    """
    tokens = np.asarray(tokens, np.int32)
    requests, scored = [], 0  # targets scored so far
    for start in range(0, len(tokens) - 1, stride):
        text = tokens[start : start + context_length + 1]
        targets = text[1:].copy()
        targets[: scored - start] = -1
        requests.append(Request(text[:-1], targets))
        scored = start + len(targets)
        if scored == len(tokens) - 1:
            break
    return requests


class Scorer:
    """A model on one or more devices, each of which scores its share of every batch.

    Args:
        model: `gpt2.model.GPT`, whose `logits_at` gives logits.
        params: of the model.
        devices: that share the rows of a batch; all local ones if not given.
        tokens_per_batch: on each device, padding included, but one row at least; what suits the
            platform if not given.

    Attributes:
        context_length: tokens that the model can read at once.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Any,
        devices: Sequence[jax.Device] | None = None,
        tokens_per_batch: int = 0,
    ):
        self.context_length = model.config.context_length
        devices = devices or jax.local_devices()
        on_cpu = devices[0].platform == "cpu"
        self._tokens_per_batch = tokens_per_batch or (
            TOKENS_PER_CPU_BATCH if on_cpu else TOKENS_PER_BATCH
        )
        mesh = jax.sharding.Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
        self._rows = NamedSharding(mesh, PartitionSpec("data"))
        self._params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
        self._num_devices = len(devices)
        self._score = jax.jit(
            jax.shard_map(
                partial(_score, model),
                mesh=mesh,
                in_specs=(PartitionSpec(), PartitionSpec("data")),
                out_specs=PartitionSpec("data"),
                check_vma=False,
            )
        )

    @property
    def num_programs(self) -> int:
        """How many programs have been compiled.

        At most two for each length of 32 * 2^i, one where few tokens are scored and one where
        many are, whatever the number of requests; requests with segments have their own.
        """
        return self._score._cache_size()

    def score(self, requests: Sequence[Request], label: str = "scoring") -> list[Score]:
        """Scores requests, in their order, with a progress bar on a terminal."""
        buckets: dict[tuple[int, int], list[int]] = {}
        for index, request in enumerate(requests):
            shape = bucket_of(request, self.context_length)
            buckets.setdefault(shape, []).append(index)
        batches = []
        for shape, rows in sorted(buckets.items(), reverse=True):
            size = max(1, self._tokens_per_batch // shape[0]) * self._num_devices
            starts = range(0, len(rows), size)
            batches += [(size, *shape, rows[start : start + size]) for start in starts]
        scores: dict[int, Score] = {}
        late: tuple[list[int], Any] | None = None  # read while the next batch is under way
        console = Console(file=sys.stderr)
        for size, length, num_scored, rows in track(
            batches, label, console=console, disable=not console.is_terminal
        ):
            batch = _pad([requests[row] for row in rows], size, length, num_scored)
            result = self._score(self._params, jax.device_put(batch, self._rows))
            if late:
                scores |= _read(*late)
            late = rows, result
        if late:
            scores |= _read(*late)
        return [scores[index] for index in range(len(requests))]


def bucket_of(request: Request, context_length: int) -> tuple[int, int]:
    """Returns the tokens (T), and the scored ones among them (K), that a request is padded to.

    The logits of many words are most of the work for a small model: where few tokens are scored,
    the end of a long text, they are computed there only.
    """
    length = bucket(len(request.tokens), context_length)
    few = min(max(SHORTEST, length // 8), length)
    return length, few if (request.targets >= 0).sum() <= few else length


def _pad(
    requests: Sequence[Request], size: int, length: int, num_scored: int
) -> dict[str, np.ndarray]:
    """Returns `tokens` (and `segments`) [B, T]; `positions` and `targets` [B, K] of scored ones."""
    batch = {
        "tokens": np.zeros((size, length), np.int32),
        "positions": np.zeros((size, num_scored), np.int32),
        "targets": np.full((size, num_scored), -1, np.int32),
    }
    if requests[0].segments is not None:
        batch["segments"] = np.zeros((size, length), np.int32)
    for row, request in enumerate(requests):
        batch["tokens"][row, : len(request.tokens)] = request.tokens
        (scored,) = np.nonzero(request.targets >= 0)
        batch["positions"][row, : len(scored)] = scored
        batch["targets"][row, : len(scored)] = request.targets[scored]
        if request.segments is not None:
            batch["segments"][row, : len(request.segments)] = request.segments
    return batch


def _score(model: nn.Module, params: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Sums over the scored tokens of each row: [B] each."""
    targets, scored = batch["targets"], batch["targets"] >= 0
    logits = model.apply(
        {"params": params},
        batch["tokens"],
        batch["positions"],
        segments=batch.get("segments"),
        method="logits_at",
    )
    chosen = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    highest = logits.max(axis=-1)
    log_probs = chosen - highest - jnp.log(jnp.exp(logits - highest[..., None]).sum(axis=-1))
    return {
        "log_prob": jnp.where(scored, log_probs, 0.0).sum(axis=1),
        "count": scored.sum(axis=1),
        "greedy": (~scored | (chosen == highest)).all(axis=1),
    }


def _read(rows: list[int], result: dict[str, jax.Array]) -> dict[int, Score]:
    """Brings a batch's scores to the host: index of the request -> score."""
    values = jax.device_get(result)
    return {
        index: Score(
            float(values["log_prob"][row]), int(values["count"][row]), bool(values["greedy"][row])
        )
        for row, index in enumerate(rows)
    }
