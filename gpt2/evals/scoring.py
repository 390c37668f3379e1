"""Log-likelihoods of many texts of mixed lengths, by few compiled programs.

Requests are sorted by length into buckets, padded on the right to their bucket's length, and scored
a batch of fixed shape at a time. Causal attention keeps the padding out of every score. The logits
are most of the work for a small model, and are computed for scored tokens only.
"""

import dataclasses
import sys
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import track

from gpt2.errors import UserError
from gpt2.model import GPT, GPTConfig
from gpt2.model.sampling import bucket

# On each device: tokens in a batch, and scored tokens whose logits exist at a time. Large numbers
# keep an accelerator busy. Small ones waste less on a CPU and keep logits in its cache.
TOKENS_PER_BATCH = 8192
LOGITS_AT_ONCE = 1024
CPU_TOKENS_PER_BATCH = 512
CPU_LOGITS_AT_ONCE = 64


@dataclasses.dataclass(frozen=True)
class Request:
    """A text, and which of its tokens to score; all are [T] int32."""

    tokens: np.ndarray  # what the model reads
    targets: np.ndarray  # the token after each; -1 where it is not scored
    segments: np.ndarray | None = None  # tokens see only those of their own segment


@dataclasses.dataclass(frozen=True)
class Score:
    """The model's score of a request."""

    log_prob: float  # of all scored tokens, in nats
    count: int  # how many those are
    greedy: bool  # whether each of them was the likeliest


def continuation(
    context: Sequence[int], tokens: Sequence[int], context_length: int
) -> Request:
    """Returns the request for the likelihood of `tokens` after `context`, cut at its beginning."""
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
    """Returns requests for every token but the first, by windows that move by `stride` tokens.

    Each window scores only tokens that earlier ones have not scored. All but the first tokens
    therefore have at least `context_length - stride` tokens of context.
    """
    ids = np.asarray(tokens, np.int32)
    # targets scored so far
    requests = []
    scored = 0
    for start in range(0, len(ids) - 1, stride):
        text = ids[start : start + context_length + 1]
        targets = text[1:].copy()
        targets[: scored - start] = -1
        requests.append(Request(text[:-1], targets))
        scored = start + len(targets)
        if scored == len(ids) - 1:
            break
    return requests


class Scorer:
    """A model on `devices`: each scores its share of every batch. Every process of theirs calls it.

    If not given, they are all local ones, and a terminal shows a progress bar. A program is
    compiled for each bucket, another if requests have segments; other weights use the same ones.
    Without `params` scores mean nothing: a rehearsal, by which a task shows that it can be read.
    """

    def __init__(
        self,
        config: GPTConfig,
        params: Any,
        devices: Sequence[jax.Device] | None = None,
    ):
        self.context_length = config.context_length
        self.num_tokens = 0
        self._console = Console(file=sys.stderr, quiet=devices is not None)
        devices = devices or jax.local_devices()
        on_cpu = devices[0].platform == "cpu"
        self._tokens_per_batch = CPU_TOKENS_PER_BATCH if on_cpu else TOKENS_PER_BATCH
        mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
        self._rows = NamedSharding(mesh, PartitionSpec("data"))
        self._params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
        self._num_devices = len(devices)
        self._score = _program(
            config, mesh, CPU_LOGITS_AT_ONCE if on_cpu else LOGITS_AT_ONCE
        )

    def score(self, requests: Sequence[Request], label: str = "scoring") -> list[Score]:
        """Scores requests, in their order."""
        self.num_tokens += sum(len(request.tokens) for request in requests)
        if self._params is None:
            return [Score(-1.0, 1, False)] * len(requests)
        buckets: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            length = bucket(len(request.tokens), self.context_length)
            buckets.setdefault(length, []).append(index)
        batches = []
        for length, rows in sorted(buckets.items(), reverse=True):
            size = max(1, self._tokens_per_batch // length) * self._num_devices
            starts = range(0, len(rows), size)
            batches += [(length, size, rows[start : start + size]) for start in starts]
        scores: dict[int, Score] = {}
        late: tuple[list[int], Any] | None = (
            None  # read while the next batch is under way
        )
        for length, size, rows in track(
            batches, label, console=self._console, disable=not self._console.is_terminal
        ):
            batch = _pad([requests[row] for row in rows], size, length)
            result = self._score(self._params, jax.tree.map(self._put, batch))
            if late:
                scores |= _read(*late)
            late = rows, result
        if late:
            scores |= _read(*late)
        return [scores[index] for index in range(len(requests))]

    def _put(self, rows: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(rows.shape, self._rows, rows.__getitem__)


@cache
def _program(
    config: GPTConfig, mesh: Mesh, at_once: int
) -> Any:  # jit's type hides `_cache_size`
    score = jax.shard_map(
        partial(_score, GPT(config), at_once),
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec("data"),
        check_vma=False,
    )
    return jax.jit(score, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _pad(requests: Sequence[Request], size: int, length: int) -> dict[str, np.ndarray]:
    shape = (size, length)
    batch = {
        "tokens": np.zeros(shape, np.int32),
        "targets": np.full(shape, -1, np.int32),
    }
    if requests[0].segments is not None:
        batch["segments"] = np.zeros(shape, np.int32)
    for row, request in enumerate(requests):
        for name, values in batch.items():
            values[row, : len(request.tokens)] = getattr(request, name)
    return batch


def _score(
    model: nn.Module, at_once: int, params: Any, batch: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Sums over the scored tokens of each row: [B] each."""
    shape = batch["targets"].shape
    targets = batch["targets"].reshape(-1)
    hidden: Any = model.apply(
        {"params": params},
        batch["tokens"],
        segments=batch.get("segments"),
        method="hidden",
    )
    hidden = hidden.reshape(targets.size, -1)
    scored = targets >= 0
    order = jnp.argsort(~scored)  # scored tokens first, since the loop visits only them
    at_once = min(at_once, targets.size)

    def body(step: jax.Array, results: tuple) -> tuple:
        log_probs, greedy = results
        # A slice that would reach beyond the end begins earlier, which only repeats some tokens.
        chosen = jax.lax.dynamic_slice_in_dim(order, step * at_once, at_once)
        logits = model.apply({"params": params}, hidden[chosen][None], method="logits")[
            0
        ]
        target = jnp.maximum(targets[chosen], 0)[:, None]
        right = jnp.take_along_axis(logits, target, axis=-1)[:, 0]
        highest = logits.max(axis=-1)
        log_prob = (
            right - highest - jnp.log(jnp.exp(logits - highest[:, None]).sum(axis=-1))
        )
        return log_probs.at[chosen].set(log_prob), greedy.at[chosen].set(
            right == highest
        )

    nothing = jnp.zeros(targets.size, jnp.float32), jnp.zeros(targets.size, bool)
    num_steps = -(-scored.sum() // at_once)
    log_probs, greedy = jax.lax.fori_loop(0, num_steps, body, nothing)
    return {
        "log_prob": jnp.where(scored, log_probs, 0.0).reshape(shape).sum(axis=1),
        "count": scored.reshape(shape).sum(axis=1),
        "greedy": (~scored | greedy).reshape(shape).all(axis=1),
    }


def _read(rows: list[int], result: dict[str, jax.Array]) -> dict[int, Score]:
    """Brings a batch's scores to the host: index of the request -> score."""
    values = jax.device_get(result)
    return {
        index: Score(
            float(values["log_prob"][row]),
            int(values["count"][row]),
            bool(values["greedy"][row]),
        )
        for row, index in enumerate(rows)
    }
