"""The loss of the validation split: nats per token, perplexity and bits per byte."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import jax

from gpt2.errors import UserError
from gpt2.utils.trees import Batch, Sums

# The number of batches that the host may dispatch ahead of the devices. With more, simulated
# devices can deadlock, because XLA runs all of them in one pool of threads.
MOST_AHEAD = 32


def validate(
    eval_step: Callable[[Mapping, Batch], Sums],
    params: Mapping,
    parts: Mapping[str, tuple[float, Iterable[Batch]]],
    targets_per_byte: float | None = None,
) -> dict[str, float]:
    """Compute the scores of all validation batches, which are on the devices.

    `parts` maps the name of each part of a mixture to its weight and batches. A single corpus has
    an empty name. Return `eval/NAME` for every sum of `eval_step`, such as `eval/loss` in nats per
    token, and `eval/perplexity`. For a mixture, `eval/NAME` is the weighted mean over the parts,
    and `eval/loss_PART` is the loss of one part. If `targets_per_byte` (the number of targets for
    each byte of text) is not None, also return `eval/bits_per_byte`.
    """
    scores: dict[str, float] = defaultdict(float)
    for part, (weight, batches) in parts.items():
        # Fetch nothing before the last batch is dispatched, so that no device waits for the host.
        sums = list[Sums]()
        for batch in batches:
            sums.append(eval_step(params, batch))
            if len(sums) > MOST_AHEAD:
                jax.block_until_ready(sums[-MOST_AHEAD])
        sums = jax.device_get(sums)
        if not any(each["loss"][1] for each in sums):
            raise UserError(
                "The validation split has no token to predict",
                "Choose a larger --config.data.val_fraction",
            )
        for name, (total, count) in jax.tree.map(
            lambda *parts: math.fsum(parts), *sums
        ).items():
            mean = total / count if count else total
            scores[f"eval/{name}"] += weight * mean
            if part and name == "loss":
                scores[f"eval/loss_{part}"] = mean
    loss = scores["eval/loss"]
    # If a loss of one's own logs a quantity with one of these names, the quantity stays.
    scores.setdefault("eval/perplexity", math.exp(min(loss, 700.0)))
    if targets_per_byte is not None:
        nats_per_byte = loss * targets_per_byte
        scores.setdefault("eval/bits_per_byte", nats_per_byte / math.log(2.0))
    return dict(scores)
