"""The training loss: a function `loss(params, batch, key=None, step=None) -> (objective, sums)`.

`objective` is the scalar to differentiate, a sum over positions. `sums` is `{name: (sum, count)}`,
the scalars to log. Steps add up both results over micro-batches and devices, and then divide once:
the gradient by the count of `sums["loss"]`, and each sum by its own count.

Each of these functions calls the next one:

    make_update            training/steps.py    once per micro-batch, through jax.grad
    loss                   next_token_loss below, or a function of your own
    apply_loss             below                also adds what modules report
    GPT.loss               model/gpt.py         computes the final hidden states
    head_loss              ops/                 computes the logits of a part of the positions
    logits_loss            next_token_loss below, or a function of your own
"""

import dataclasses
from collections.abc import Callable, Collection

from jax import Array

from gpt2.config import LossConfig
from gpt2.errors import UserError
from gpt2.model import GPT
from gpt2.model.gpt import Params
from gpt2.ops import plain
from gpt2.ops.plain import LogitsLoss
from gpt2.training.losses.ahead import Ahead
from gpt2.training.losses.term import LossTerm
from gpt2.training.losses.z_loss import ZLoss
from gpt2.utils.scan import METRICS, reported
from gpt2.utils.trees import Batch, Sums

LossFn = Callable[..., tuple[Array, Sums]]

# The arrays of a batch that every loss may read. A batch does not need to have `segments`.
NEXT_TOKEN_ARRAYS = {"tokens", "targets", "segments"}

LOSS_TERMS: tuple[type[LossTerm], ...] = (Ahead, ZLoss)


def next_token_loss(model: GPT, options: LossConfig = LossConfig()) -> LossFn:
    """Return GPT-2's training loss: the cross-entropy of the next token in nats.

    `options` may add further terms. train.py may use another function with this signature.
    """
    terms = [term(options) for term in LOSS_TERMS if term.is_wanted(options)]

    def loss(
        params: Params,
        batch: Batch,
        key: Array | None = None,
        step: Array | None = None,
    ) -> tuple[Array, Sums]:
        arrays = Batch()
        for term in terms:
            arrays |= term.arrays(batch)

        def logits_loss(logits: Array, part: Batch) -> tuple[Array, Sums]:
            targets = part["targets"]
            log_normaliser = model.ops.log_sum_exp(logits)
            losses = log_normaliser - plain.target_logits(logits, targets)
            sums = {"loss": plain.masked_sum(losses, targets)}
            objective = sums["loss"][0]
            for term in terms:
                weighted, to_log = term.sums(logits, log_normaliser, part, step)
                objective += weighted
                sums |= to_log
            return objective, sums

        return apply_loss(model, params, batch | arrays, logits_loss, key, reads=arrays)

    return loss


def apply_loss(
    model: GPT,
    params: Params,
    batch: Batch,
    logits_loss: LogitsLoss,
    key: Array | None = None,
    reads: Collection[str] = (),
) -> tuple[Array, Sums]:
    """Return the objective and the sums of a batch, including what the model's modules report.

    Args:
        model: the model that computes the logits.
        params: the parameters of the model.
        batch: arrays `[B, T]` by name: `tokens`, `targets` (-1: no target), optionally `segments`,
            and the arrays in `reads`.
        logits_loss: a function that returns `(objective, sums)` for float32 logits `[B, T, V]` and
            the batch. The model calls it with a part of the positions at a time and adds up the
            results. One of the sums is "loss". Columns that pad the vocabulary have logits of -1e9.
        key: the random key of dropout; None: no dropout.
        reads: names of the batch's arrays that `logits_loss` reads in addition to `targets`.
    """
    missing = {*reads} - batch.keys()
    if missing:
        raise UserError(
            f"The loss reads the arrays {sorted(missing)}, which the batch does not have",
            "Add these arrays to your batches",
        )
    unread = batch.keys() - NEXT_TOKEN_ARRAYS - {*reads}
    if unread:
        raise UserError(
            f"The batch has the arrays {sorted(unread)}, which the loss does not read",
            "Remove them from the batch, or write a loss that reads them (docs/architecture.md)",
        )
    (objective, sums), variables = model.apply(
        {"params": params},
        batch,
        logits_loss,
        deterministic=key is None,
        rngs={} if key is None else {"dropout": key},
        method="loss",
        mutable=[METRICS],
    )
    if "loss" not in sums:
        raise UserError(
            f"The loss returns the sums {sorted(sums)}, but no entry 'loss', by whose count the "
            "gradient is divided",
            "Add the entry 'loss': (sum, count) to the sums that the loss returns",
        )
    if METRICS in variables:
        for name, report in reported(variables[METRICS]).items():
            total, count, auxiliary = report
            if name in sums:
                raise UserError(
                    f"A module reports {name!r}, but the loss already logs a sum of that name",
                    "Rename one of the two",
                )
            sums[name] = total, count
            objective += auxiliary
    return objective, sums


def evaluation_loss(model: GPT, others: LossFn | None = None) -> LossFn:
    """Return the validation loss, a function `loss(params, batch) -> (objective, sums)`.

    It computes the cross-entropy of float32 logits, without dropout or the terms of `loss.`. If
    `others` is another loss function, `sums` also contains the sums of `others`, except "loss". To
    compute them, the model runs a second time.
    """
    config = dataclasses.replace(model.config, logits_dtype="float32")
    cross_entropy = next_token_loss(model.clone(config=config))
    if others is None:
        return cross_entropy

    def loss(params: Params, batch: Batch) -> tuple[Array, Sums]:
        _, more = others(params, batch)
        read = {name: x for name, x in batch.items() if name in NEXT_TOKEN_ARRAYS}
        objective, sums = cross_entropy(params, read)
        return objective, more | sums

    return loss
