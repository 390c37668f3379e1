"""Held-out text, in the three units people compare."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import jax

from gpt2.errors import UserError
from gpt2.utils.trees import Batch, Sums

# Batches that the host may be ahead of the devices. Simulated devices that get further wait for
# each other for ever, since XLA has one pool of threads for all of them.
MOST_AHEAD = 32


def _add_up(*values: float) -> float:
    return math.fsum(values)


def validate(
    eval_step: Callable[[Mapping, Batch], Sums],
    params: Mapping,
    held_out: Mapping[str, tuple[float, Iterable[Batch]]],
    targets_per_byte: float | None = None,
) -> dict[str, float]:
    """Score every target of batches, which are on the devices already.

    `held_out` has each part of a mixture with its share, or all of it under an empty name. Returns
    `eval/NAME` for all that `eval_step` sums, `eval/loss` (nats per token) among it, over the
    mixture, `eval/loss_PART`, `eval/perplexity`, and `eval/bits_per_byte` if the tokens to predict
    for each byte are known.
    """
    scores: dict[str, float] = defaultdict(float)
    for part, (share, batches) in held_out.items():
        # Nothing is fetched before the last batch is dispatched.
        sums = list[Sums]()
        for batch in batches:
            sums.append(eval_step(params, batch))
            if len(sums) > MOST_AHEAD:
                jax.block_until_ready(sums[-MOST_AHEAD])
        sums = jax.device_get(sums)
        if not any(each["loss"][1] for each in sums):
            raise UserError("the validation split has no token to predict")
        for name, (total, count) in jax.tree.map(_add_up, *sums).items():
            mean = total / count if count else total
            scores[f"eval/{name}"] += share * mean
            if part and name == "loss":
                scores[f"eval/loss_{part}"] = mean
    loss = scores["eval/loss"]
    scores["eval/perplexity"] = math.exp(min(loss, 700.0))
    if targets_per_byte is not None:
        nats_per_byte = loss * targets_per_byte
        scores["eval/bits_per_byte"] = nats_per_byte / math.log(2.0)
    return dict(scores)
