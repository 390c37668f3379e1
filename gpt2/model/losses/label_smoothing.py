"""A share of each target for all tokens alike (Szegedy et al. 2016, section 7).

One more pass over the logits.
"""

import dataclasses

from jax import Array

from gpt2.model.losses.base import LossIngredient, Question, with_term


class LabelSmoothing(LossIngredient):
    """`loss.label_smoothing`, the share."""

    option = "label_smoothing"

    def ask(
        self, question: Question, segments: Array | None, step: Array | None
    ) -> Question:
        """Adds the term."""
        return with_term(
            question, "label_smoothing", _Smoothing(self.options.label_smoothing)
        )


@dataclasses.dataclass(frozen=True)
class _Smoothing:
    share: float

    def __call__(
        self, logits: Array, log_normaliser: Array, target_logits: Array
    ) -> Array:
        return self.share * (target_logits - logits.mean(axis=-1, keepdims=True))
