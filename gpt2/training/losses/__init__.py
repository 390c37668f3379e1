"""The training loss: next-token prediction, and the terms that options of `loss.` add."""

from gpt2.training.losses.next_token import (
    LOSS_TERMS,
    LossFn,
    apply_loss,
    evaluation_loss,
    next_token_loss,
)
