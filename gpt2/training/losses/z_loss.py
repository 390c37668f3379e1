"""The z-loss: the square of the log of softmax's normaliser (PaLM, arXiv 2204.02311, section 5).

Cross-entropy does not change if a constant is added to all logits of a position, so the logits can
drift. The z-loss prevents this, because it keeps the log of the normaliser near 0.
"""

from jax import Array

from gpt2.ops import plain
from gpt2.training.losses.term import LossTerm
from gpt2.utils.trees import Batch, Sums


class ZLoss(LossTerm):
    """The z-loss. It is logged as `z_loss`, without its weight `loss.z_loss`."""

    option = "z_loss"

    def sums(
        self, logits: Array, log_normaliser: Array, batch: Batch, step: Array | None
    ) -> tuple[Array, Sums]:
        """Return the weighted sum of squares, and the unweighted sum to log."""
        total, count = plain.masked_sum(log_normaliser**2, batch["targets"])
        return self.options.z_loss * total, {"z_loss": (total, count)}
