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
        """Return further arrays `[B, T]` that `sums` reads, computed from the whole batch."""
        return {}

    def sums(
        self, logits: Array, log_normaliser: Array, batch: Batch, step: Array | None
    ) -> tuple[Array | float, Sums]:
        """Return the weighted term, summed over positions, and sums and counts to log, by name.

        `logits` are `[B, T, V]`, where those of padding are -1e9; `log_normaliser`, the log of
        softmax's normaliser, is `[B, T]`. The positions may be a part of the batch. `step` is None
        in validation. Log what has no weight: the weight is known from the config.
        """
        raise NotImplementedError
