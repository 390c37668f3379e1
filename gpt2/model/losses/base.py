"""Where an ingredient of the loss acts."""

from typing import ClassVar, NamedTuple

from jax import Array

from gpt2.config import DEFAULTS, LossConfig
from gpt2.ops import Objective
from gpt2.ops.plain import LossTerm


class Question(NamedTuple):
    """What a model is asked, and how its answers are called in the log."""

    targets: Array  # [B, T, K] int32; -1: none
    objective: Objective
    names: tuple[str, ...] = ("loss",)  # of the targets
    term_names: tuple[str, ...] = ()  # of the objective's loss terms


class LossIngredient:
    """One thing that a training loss may have, asked for by an option of `loss.`."""

    option: ClassVar[str]

    def __init__(self, options: LossConfig):
        self.options = options

    @classmethod
    def is_wanted(cls, options: LossConfig) -> bool:
        """Returns whether a run has it: whether its option differs from its default."""
        return getattr(options, cls.option) != getattr(DEFAULTS.loss, cls.option)

    def ask(
        self, question: Question, segments: Array | None, step: Array | None
    ) -> Question:
        """Changes what is asked at a step, None outside of training."""
        raise NotImplementedError


def with_term(question: Question, name: str, term: LossTerm) -> Question:
    """Returns a question with one more loss term, logged under a name."""
    terms = (*question.objective.loss_terms, term)
    return question._replace(
        objective=question.objective._replace(loss_terms=terms),
        term_names=(*question.term_names, name),
    )
