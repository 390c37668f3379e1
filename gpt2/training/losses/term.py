"""The interface of a term of the training loss."""

from typing import ClassVar

from jax import Array

from gpt2.config import DEFAULTS, LossConfig
from gpt2.utils.trees import Batch, Sums


class LossTerm:
    """A term that an option of `loss.` adds to the objective."""

    option: ClassVar[str]

    def __init__(self, options: LossConfig):
        self.options = options

    @classmethod
    def is_wanted(cls, options: LossConfig) -> bool:
        """Return whether a run uses the term: whether its option differs from the default."""
        return getattr(options, cls.option) != getattr(DEFAULTS.loss, cls.option)

    def arrays(self, batch: Batch) -> Batch:
        """Return additional arrays `[B, T]` that `sums` reads, computed from the whole batch."""
        return {}

    def sums(
        self, logits: Array, log_normaliser: Array, batch: Batch, step: Array | None
    ) -> tuple[Array | float, Sums]:
        """Return the weighted sum of the term over positions, and `{name: (sum, count)}` to log.

        `logits` are `[B, T, V]`, with the value -1e9 in columns that pad the vocabulary.
        `log_normaliser` `[B, T]` is the log of softmax's normaliser. All arrays may contain only a
        part of the batch's positions. `step` is None in validation, which computes terms only
        through a user's own loss. The sums to log are not multiplied by the term's weight.
        """
        raise NotImplementedError
