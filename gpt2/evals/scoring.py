"""Compute log-likelihoods of many texts of mixed lengths with few compiled programs.

Requests are sorted by length into buckets, padded on the right to the length of their bucket, and
scored in batches of fixed shape. Because attention is causal, the padding does not affect scores.
Logits are most of the work of a small model, so they are computed only for scored tokens.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped
from rich.console import Console
from rich.progress import track

from gpt2.errors import UserError
from gpt2.model import GPT, with_kernels
from gpt2.model.sampling import bucket
from gpt2.parallel.compiled import run_alone

# Number of tokens of a batch on each device. The logits of an eighth of these tokens are in memory
# at a time. A large batch uses an accelerator fully. A small batch wastes less time on padding, and
# its logits fit in the cache of a CPU.
TOKENS_PER_BATCH = 8192
CPU_TOKENS_PER_BATCH = 512


class Request(NamedTuple):
    """A text, and which of its tokens to score: int32 arrays `[T]`, or `[B, T]` for a batch."""

    tokens: np.ndarray  # the input tokens of the model
    targets: np.ndarray  # the token after each position, or -1 if it is not scored
    segments: np.ndarray | None = None  # the segment of each token, for attention


class Score(NamedTuple):
    """The score of a request, that is, of all its scored tokens together."""

    log_prob: float  # sum over the scored tokens, in nats
    count: int  # type: ignore[assignment] # number of scored tokens
    greedy: bool  # whether each scored token was the most likely


Tokens = Sequence[int] | np.ndarray


def continuation(context: Tokens, tokens: Tokens, context_length: int) -> Request:
    """Return a request that scores `tokens` after `context`.

    If `context` and `tokens` together are too long, the beginning of `context` is removed. Raise a
    ValueError if either is empty, or if `tokens` are more than `context_length`.
    """
    if not len(context) or not 0 < len(tokens) <= context_length:
        # `reading` adds the file and the line of the example.
        raise ValueError(
            f"the example has {len(context)} tokens of context and {len(tokens)} tokens to score, "
            f"but the model needs at least 1 token of context and 1 to {context_length} tokens to "
            "score"
        )
    text = np.array([*context, *tokens], np.int32)
    text = text[-context_length - 1 :]
    targets = text[1:].copy()
    targets[: -len(tokens)] = -1
    return Request(text[:-1], targets)


def windows(tokens: Tokens, context_length: int, stride: int) -> list[Request]:
    """Return requests that together score every token except the first, each of them once.

    A request is a window of up to `context_length` inputs, and begins `stride` tokens after the
    previous window. A window scores only tokens that earlier windows have not scored. After the
    first window, every scored token therefore has at least `context_length - stride` tokens of
    context.
    """
    ids = np.asarray(tokens, np.int32)
    requests = []
    scored = 0  # number of tokens scored so far
    start = 0
    while scored < len(ids) - 1:
        text = ids[start : start + context_length + 1]
        targets = text[1:].copy()
        targets[: scored - start] = -1
        requests.append(Request(text[:-1], targets))
        scored = start + len(targets)
        start += stride
    return requests


class Scorer:
    """A model that scores requests on `devices`, with a part of each batch on every device.

    Every process that has one of the devices must call the scorer. Without `devices`, the scorer
    uses all local devices, and shows a progress bar in a terminal. It compiles one program for each
    length to which requests are padded. For requests with segments, it compiles separate programs.
    Scorers of the same model with other weights use the same programs.

    If `params` is None, nothing is computed, and the scores are meaningless. A run uses this to
    find out whether the files of its tasks can be read. Windows over a text advance by `stride`
    tokens or, if `stride` is 0, by half of the context.
    """

    def __init__(
        self,
        model: GPT,
        params: chex.ArrayTree | None,
        devices: Sequence[jax.Device] | None = None,
        stride: int = 0,
    ):
        T = model.config.context_length
        self.context_length = T
        self.stride = stride or max(1, T // 2)
        if stride > T:
            raise UserError(
                f"--stride={stride} would skip tokens, because it exceeds the context length {T}",
                f"Use a stride of at most {T}",
            )
        self.num_tokens = 0
        self._console = Console(stderr=True, quiet=devices is not None)
        devices = devices or jax.local_devices()
        automatic = (AxisType.Auto,)
        mesh = Mesh(devices, ("data",), axis_types=automatic)
        self._rows = NamedSharding(mesh, PartitionSpec("data"))
        whole = NamedSharding(mesh, PartitionSpec())
        self._params = jax.device_put(params, whole)
        self._tokens_per_batch = TOKENS_PER_BATCH
        if devices[0].platform == "cpu":
            self._tokens_per_batch = CPU_TOKENS_PER_BATCH
        self._score = _program(with_kernels(model, devices[0]), mesh)

    def score(self, requests: Sequence[Request], label: str = "scoring") -> list[Score]:
        """Return the scores of requests, in the order of the requests.

        `label` is the text in front of the progress bar.
        """
        buckets = defaultdict[int, list[int]](list)
        for index, request in enumerate(requests):
            length = bucket(len(request.tokens), self.context_length)
            buckets[length].append(index)
        if self._params is None:
            return [Score(-1.0, 1, False)] * len(requests)
        batches = []
        for length, rows in sorted(buckets.items(), reverse=True):
            size = max(1, self._tokens_per_batch // length)
            size *= self._rows.mesh.size
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                batches.append((length, size, part))
        scores: dict[int, Score] = {}
        hidden = not self._console.is_terminal
        for length, size, rows in track(
            batches, label, console=self._console, disable=hidden
        ):
            self.num_tokens += size * length
            members = [requests[row] for row in rows]
            batch = jax.device_put(_pad(members, size, length), self._rows)
            result = run_alone(self._score, self._params, batch)
            columns = [column.tolist() for column in jax.device_get(result)]
            for index, *values in zip(rows, *columns, strict=False):
                scores[index] = score = Score(*values)
                if math.isnan(
                    score.log_prob
                ):  # no comparison of scores would notice it
                    raise UserError(
                        "The model computes NaN for a text of the task",
                        "Check that the weights have no NaN or Inf",
                    )
        return [scores[index] for index in range(len(requests))]

    def score_groups(
        self, groups: Sequence[Sequence[Request]], label: str
    ) -> list[list[Score]]:
        """Return the scores of groups of requests, in the same nested lists.

        A group contains, for example, all alternative answers to a question.
        """
        requests = itertools.chain.from_iterable(groups)
        scores = iter(self.score([*requests], label))
        return [[*itertools.islice(scores, len(group))] for group in groups]


@cache
def _program(model: GPT, mesh: Mesh) -> Wrapped:
    whole = PartitionSpec()
    rows = PartitionSpec("data")
    score = jax.shard_map(
        partial(_score, model),
        mesh=mesh,
        in_specs=(whole, rows),
        out_specs=rows,
        check_vma=False,
    )
    return jax.jit(score, out_shardings=NamedSharding(mesh, whole))


def _pad(requests: Sequence[Request], size: int, length: int) -> Request:
    """Return requests as one batch `[size, length]`.

    Shorter requests are padded, and rows without scored tokens are added.
    """

    def pad(name: str, fill: int) -> np.ndarray:
        batch = np.full((size, length), fill, np.int32)
        for row, request in enumerate(requests):
            values = getattr(request, name)
            batch[row, : len(values)] = values
        return batch

    tokens = pad("tokens", 0)
    targets = pad("targets", -1)
    if requests[0].segments is None:
        return Request(tokens, targets)
    return Request(tokens, targets, pad("segments", 0))


def _score(
    model: nn.Module,
    params: Mapping,
    batch: Request,
) -> tuple[jax.Array, ...]:
    """Return the fields of a `Score` for the rows of a batch, as arrays `[B]`."""
    is_scored = batch.targets >= 0
    shape = is_scored.shape
    targets = jnp.ravel(batch.targets)
    variables = {"params": params}
    hidden: Any = model.apply(
        variables, batch.tokens, segments=batch.segments, method="hidden"
    )
    hidden = hidden.reshape(targets.size, -1)
    # Scored tokens are moved to the front, so that the loop can end after the last scored token.
    order = jnp.argsort(targets < 0)
    chunk = targets.size // 8

    def body(step: jax.Array, results: tuple) -> tuple:
        log_probs, greedy = results
        # If a slice would extend beyond the end, JAX moves its start. Some tokens are then computed
        # twice, which changes nothing.
        chosen = jax.lax.dynamic_slice_in_dim(order, step * chunk, chunk)
        rows = hidden[chosen][None]
        tokens = jnp.ravel(batch.tokens)[chosen][None]
        logits = model.apply(variables, rows, tokens, method="logits")[0]
        target = jnp.maximum(targets[chosen], 0)
        right = jnp.take_along_axis(logits, target[:, None], axis=-1)
        right = jnp.ravel(right)
        log_prob = right - jax.nn.logsumexp(logits, axis=-1)
        log_probs = log_probs.at[chosen].set(log_prob)
        likeliest = right == logits.max(axis=-1)
        return log_probs, greedy.at[chosen].set(likeliest)

    nothing = (jnp.zeros_like(targets, jnp.float32), jnp.zeros_like(targets, bool))
    num_steps = -(-is_scored.sum() // chunk)  # rounded up
    log_probs, greedy = jax.lax.fori_loop(0, num_steps, body, nothing)
    log_prob = log_probs.reshape(shape).sum(axis=1, where=is_scored)
    is_greedy = greedy.reshape(shape).all(axis=1, where=is_scored)
    return log_prob, jnp.sum(is_scored, axis=1), is_greedy
