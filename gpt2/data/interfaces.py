"""The interfaces between readers, prepared data and runs.

A reader opens a `Corpus`, which is prepared once as a `Dataset`. A run opens the dataset as a
`Source` of batches.
"""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Protocol

import numpy as np

from gpt2.config import Config, DataConfig
from gpt2.data.tokenizer import Tokenizer
from gpt2.data.tokens import PreparedTokens

# Arrays [B, T] by name. `tokens`, `targets` and the optional `segments` are int32. A target is the
# next token, or -1 where no token is to be predicted. A segment is the number, within the row, of
# the document that contains the token.
Batch = dict[str, np.ndarray]
# The weight of a corpus in the mean loss of a mixture, and the batches of the corpus.
WeightedBatches = tuple[float, Iterable[Batch]]
# Name of a corpus -> its weight and its prepared tokens. The weights add up to 1.
Parts = Mapping[str, tuple[Fraction, PreparedTokens]]


class Source(Protocol):
    """The batches of one run. The first step is step 1."""

    def batch(self, step: int, rows: slice) -> Batch:
        """Return the given `rows` of a step's batch, which are the rows that this process reads."""

    def validation(
        self, rows: slice, num_batches: int = 0
    ) -> tuple[dict[str, WeightedBatches], float | None]:
        """Return `({corpus: (weight, batches)}, targets_per_byte)` for the validation split.

        `rows` are the rows of each batch that this process reads. `num_batches` limits the number
        of batches of each corpus. If it is 0, the run's options limit the number. A single corpus
        has an empty name. `targets_per_byte` is the number of targets divided by the number of
        bytes of text, or None if this ratio is not known, or if the batches do not cover the whole
        text.
        """

    def describe(self, num_steps: int) -> str:
        """Return a human-readable description of the data that `num_steps` steps read."""

    def position(self, step: int) -> str | None:
        """Return this process's position in the data after a step, for a checkpoint.

        None means that the number of the step alone determines the position.
        """
        return None

    def restore(self, position: str) -> None:
        """Continue from `position`, a string that the method `position` returned.

        Call this before the first batch is read.
        """
        return  # the step alone determines the batches


class Dataset(Protocol):
    """What a run reads: the prepared tokens of a corpus or of a mixture, or a user's batches."""

    tokenizer: Tokenizer
    parts: Parts  # empty for a user's batches

    @property
    def targets_per_byte(self) -> float | None:
        """Targets per byte of the validation text, or None if the number is not known."""
        return None

    def describe(self) -> dict[str, object]:
        """Return a description of the data for a run's data.json.

        It does not contain the location of the data, so it stays the same if files are moved.
        """

    def open(self, config: Config) -> Source:
        """Return the batches of a run that has the options `config`."""


class Corpus(Protocol):
    """A corpus that a reader has opened. Its text has not been encoded yet."""

    def prepare(self, data: DataConfig) -> Dataset:
        """Return the dataset of this corpus, prepared with the `data.` options.

        If its tokens are not on this machine yet, fetch or write them first.
        """
