"""The interfaces between readers, prepared data and runs.

A reader opens a `Corpus`, which is prepared once as a `Dataset`. A run opens that as a `Source` of
batches.
"""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Protocol

import numpy as np

from gpt2.config import Config, DataConfig
from gpt2.data.tokenizer import Tokenizer
from gpt2.data.tokens import PreparedTokens

# Arrays [B, T] by name: `tokens` int32; `targets` int32, the token that follows each, or -1 where
# there is none to predict; maybe `segments` int32, the document's number within the row.
Batch = dict[str, np.ndarray]
# The weight of a corpus in the mean loss of a mixture, and its batches.
WeightedBatches = tuple[float, Iterable[Batch]]
# Prepared tokens by name, with their weights, which add to 1.
Parts = Mapping[str, tuple[Fraction, PreparedTokens]]


class Source(Protocol):
    """The batches of one run. Steps are counted 1, 2, 3, ...."""

    def batch(self, step: int, rows: slice) -> Batch:
        """Return `rows`, which this process reads, of the batch of a step."""

    def validation(
        self, rows: slice, num_batches: int = 0
    ) -> tuple[dict[str, WeightedBatches], float | None]:
        """Return the first `num_batches` of each corpus of a mixture; 0: of all that are scored.

        A corpus that is not mixed has an empty name. The second value is the number of targets for
        each byte of the validation text, or None unless the batches cover all of it.
        """

    def describe(self, num_steps: int) -> str:
        """Return a text for people on what `num_steps` steps read."""

    def position(self, step: int) -> str | None:
        """Return where this process stands after a step; None: the step alone determines it."""
        return None

    def restore(self, position: str) -> None:
        """Continue from a position. It is called before the first batch."""
        return  # the step alone determines the batches


class Dataset(Protocol):
    """What a run reads: prepared tokens, a mixture of several, or a user's batches."""

    tokenizer: Tokenizer
    parts: Parts  # a user's batches have none

    @property
    def targets_per_byte(self) -> float | None:
        """Targets for each byte of the validation text, or None if that is unknown."""
        return None

    def describe(self) -> dict[str, object]:
        """Return what it holds, not where it is stored, for a run's data.json."""

    def open(self, config: Config) -> Source:
        """Return the batches of a run."""


class Corpus(Protocol):
    """What a reader opens. Opening it reads no text."""

    def prepare(self, data: DataConfig) -> Dataset:
        """Return the dataset, which is written first if this machine has none."""
