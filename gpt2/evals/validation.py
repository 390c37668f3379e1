"""The loss over held-out text, in the three units people compare."""

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

from gpt2.errors import DivergedError
from gpt2.training.feed import Feed

# Batches that the host may be ahead of the devices. Simulated devices that get further wait for
# each other for ever, since XLA has one pool of threads for all of them.
MOST_AHEAD = 32
MEASURED = 4  # batches that tell how long a validation takes


class Validator:
    """Scores a run's validation split, as often as asked.

    Args:
        eval_step: compiled, `(params, batch) -> {"loss_sum", "count"}`.
        feed: of the run.

    Attributes:
        seconds: how long a whole validation takes; 0 before the first one, or `measure`.
    """

    def __init__(self, eval_step: Callable, feed: Feed):
        self._eval_step, self._feed = eval_step, feed
        # The number of bytes is known only for the whole split.
        self._targets_per_byte = feed.targets_per_byte if feed.eval_is_whole else None
        self.seconds = 0.0

    def __call__(self, step: int, params: Any, num_batches: int = 0) -> dict[str, float]:
        """Returns the scores of `validate`.

        Args:
            step: the newest step of `params`, for messages.
            params: of the model, placed as they train.
            num_batches: the split's first batches; 0: all that a validation has.

        Raises:
            DivergedError: the loss is not finite.
        """
        began, whole = time.monotonic(), self._feed.num_eval_batches
        with self._feed.eval_batches(num_batches or whole) as batches:
            scores = validate(self._eval_step, params, batches, self._targets_per_byte)
        if not num_batches:
            self.seconds = time.monotonic() - began
        if not math.isfinite(scores["eval/loss"]):
            raise DivergedError(step, "the validation loss is", before=False)
        return scores

    def measure(self, step: int, params: Any) -> None:
        """Estimates `seconds` from a few batches, if no validation has measured it yet."""
        if self.seconds:
            return
        whole = self._feed.num_eval_batches
        few = min(MEASURED, whole)
        self(step, params, few)  # the first ones are slower
        began = time.monotonic()
        self(step, params, few)
        self.seconds = (time.monotonic() - began) * whole / few


def validate(
    eval_step: Callable, params: Any, batches: Iterable[Any], targets_per_byte: float | None
) -> dict[str, float]:
    """Scores every target of `batches`.

    Args:
        eval_step: compiled, `(params, batch) -> {"loss_sum", "count"}`.
        params: of the model.
        batches: on the devices already.
        targets_per_byte: tokens to predict for each UTF-8 byte of the scored text; None if unknown.

    Returns:
        `eval/loss` (nats per token), `eval/perplexity` (per token) and, if `targets_per_byte` is
        given, `eval/bits_per_byte`.
    """
    # Nothing is fetched before the last batch is dispatched.
    sums: list[Any] = []
    for batch in batches:
        sums.append(eval_step(params, batch))
        if len(sums) > MOST_AHEAD:
            jax.block_until_ready(sums[-MOST_AHEAD])
    sums = jax.device_get(sums)
    loss = math.fsum(s["loss_sum"] for s in sums) / math.fsum(s["count"] for s in sums)
    scores = {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}
    if targets_per_byte is not None:
        scores["eval/bits_per_byte"] = loss * targets_per_byte / math.log(2.0)
    return scores
