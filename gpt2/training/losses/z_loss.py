"""The square of the log of softmax's normaliser (PaLM, arXiv 2204.02311, section 5).

It keeps the logits of a position near 0, which cross-entropy leaves free to shift together.
"""

from jax import Array

from gpt2.ops import plain
from gpt2.training.losses.term import LossTerm
from gpt2.utils.trees import Batch, Sums


class ZLoss(LossTerm):
    """`loss.z_loss`, the weight. Logged as `z_loss`, without the weight."""

    option = "z_loss"

    def sums(
        self, logits: Array, log_normaliser: Array, batch: Batch, step: Array | None
    ) -> tuple[Array, Sums]:
        """Return the weighted sum of squares, and the sum itself."""
        total, count = plain.sum_real(log_normaliser**2, batch["targets"])
        return self.options.z_loss * total, {"z_loss": (total, count)}
