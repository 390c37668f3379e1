"""What `data.corpus` names, and what a run reads from it.

A reader opens a `Corpus`, which is prepared once as a `Dataset`. A run opens that as a `Source` of
batches.
"""

import abc
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np

from gpt2.config import Config, DataConfig
from gpt2.data.tokenizer import Tokenizer
from gpt2.data.tokens import PreparedTokens
from gpt2.errors import UserError
from gpt2.utils import files

# Arrays [B, T] by name: `tokens` int32; `targets` int32, the token that follows each, or -1 where
# there is none to predict; maybe `segments` int32, the document's number within the row.
Batch = dict[str, np.ndarray]
# The weight of a corpus in the mean loss of a mixture, and its batches.
WeightedBatches = tuple[float, Iterable[Batch]]


class Source(abc.ABC):
    """The batches of one run. Steps are counted 1, 2, 3, ...."""

    @abc.abstractmethod
    def batch(self, step: int, rows: slice) -> Batch:
        """Return `rows`, which this process reads, of the batch of a step."""

    @abc.abstractmethod
    def validation(
        self, rows: slice, num_batches: int = 0
    ) -> tuple[dict[str, WeightedBatches], float | None]:
        """Return the first `num_batches` of each corpus of a mixture; 0: of all that are scored.

        A corpus that is not mixed has an empty name. The second value is the number of targets for
        each byte of the validation text, or None unless the batches cover all of it.
        """

    @abc.abstractmethod
    def describe(self, num_steps: int) -> str:
        """Return a text for people on what `num_steps` steps read."""

    def position(self, step: int) -> str | None:
        """Return where this process stands after a step; None: the step alone determines it."""
        return None

    def restore(self, position: str) -> None:
        """Continue from a position. It is called before the first batch."""
        raise NotImplementedError


class Dataset(abc.ABC):
    """What a run reads: prepared tokens, a mixture of several, or a user's batches."""

    tokenizer: Tokenizer
    # Prepared tokens by name, with their weights, which add to 1; a user's batches have none.
    parts: Mapping[str, tuple[Fraction, PreparedTokens]]

    @property
    def targets_per_byte(self) -> float | None:
        """Targets for each byte of the validation text, or None if that is unknown."""
        return None

    @abc.abstractmethod
    def describe(self) -> dict[str, object]:
        """Return what it holds, not where it is stored, for a run's data.json."""

    @abc.abstractmethod
    def open(self, config: Config) -> Source:
        """Return the batches of a run."""


class Corpus(abc.ABC):
    """What a reader opens. Opening it reads no text."""

    @abc.abstractmethod
    def prepare(self, data: DataConfig) -> Dataset:
        """Return the dataset, which is written first if this machine has none."""


def require_finished_tokenizer(data: DataConfig) -> None:
    """Refuse a tokenizer that would have to be trained, where there is not one text for it."""
    if data.tokenizer == "char" or data.tokenizer.startswith("bpe:"):
        raise UserError(
            f"data.tokenizer={data.tokenizer} is trained on one corpus of text, and "
            f"data.corpus={data.corpus} is not one",
            "Let gpt2.data.prepare train it on a text, and name the tokenizer.json in its folder",
        )


def refuse_other(path: Path, dataset: Dataset) -> bool:
    """Refuse a dataset that differs from a run's data.json; returns False if that is missing."""
    saved = files.read_sealed(path)
    if saved is None:
        return False
    if saved != dataset.describe():
        raise UserError(
            f"The text or tokenizer is no longer what {path.parent} was trained on",
            "Restore it, or give another --workdir",
        )
    return True
