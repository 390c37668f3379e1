"""Where an ingredient of the loss acts."""

from typing import ClassVar

from jax import Array

from gpt2.config import DEFAULTS, LossConfig

Weight = Array | float


class LossIngredient:
    """One thing that a training loss may have, asked for by an option of `loss.`.

    Each seam adds nothing, unless a file overrides it.
    """

    option: ClassVar[str]

    def __init__(self, options: LossConfig):
        self.options = options

    @classmethod
    def is_wanted(cls, options: LossConfig) -> bool:
        """Returns whether a run has it: whether its option differs from its default."""
        return getattr(options, cls.option) != getattr(DEFAULTS.loss, cls.option)

    def targets(
        self, targets: Array, segments: Array | None, step: Array
    ) -> dict[str, tuple[Array, Weight]]:
        """Returns more targets of a training step, `[B, T]` each, by the names of their losses.

        With each goes the weight that its loss has in the objective.
        """
        return {}

    def term(
        self, logits: Array, log_normaliser: Array, at_targets: Array
    ) -> Array | None:
        """Returns what joins the objective at each position, `[B, T]`; None: nothing.

        It is logged under the option's name, and follows from logits `[B, T, V]`, the logs of
        softmax's normalisers `[B, T]`, and the targets' logits `[B, T]`.
        """
        return None
