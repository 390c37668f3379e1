"""The loss over held-out text, in the three units people compare."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax


def validate(
    eval_step: Callable, params: Any, batches: Iterable[dict], targets_per_byte: float | None
) -> dict[str, float]:
    """Scores every target of `batches`.

    Args:
        eval_step: compiled, `(params, batch) -> {"loss_sum", "count"}`.
        params: of the model.
        batches: on the devices already.
        targets_per_byte: tokens to predict for each UTF-8 byte of the text scored; None: nobody
            counted its bytes.

    Returns:
        `eval/loss` (nats per token), `eval/perplexity` (per token) and, where bytes were counted,
        `eval/bits_per_byte`.
    """
    # Nothing is fetched before the last batch is under way.
    sums = jax.device_get([eval_step(params, batch) for batch in batches])
    loss = math.fsum(s["loss_sum"] for s in sums) / math.fsum(s["count"] for s in sums)
    scores = {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}
    if targets_per_byte is not None:
        scores["eval/bits_per_byte"] = loss * targets_per_byte / math.log(2.0)
    return scores
