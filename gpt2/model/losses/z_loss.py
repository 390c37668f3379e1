"""The weighted square of the log of softmax's normaliser (PaLM, arXiv 2204.02311, section 5).

It keeps logits near 0: a number a row.
"""

import dataclasses

from jax import Array

from gpt2.model.losses.base import LossIngredient, Question, with_term


class ZLoss(LossIngredient):
    """`loss.z_loss`, the weight."""

    option = "z_loss"

    def ask(
        self, question: Question, segments: Array | None, step: Array | None
    ) -> Question:
        """Adds the term."""
        return with_term(question, "z_loss", _ZTerm(self.options.z_loss))


@dataclasses.dataclass(frozen=True)
class _ZTerm:
    weight: float

    def __call__(
        self, logits: Array, log_normaliser: Array, target_logits: Array
    ) -> Array:
        return self.weight * log_normaliser**2
