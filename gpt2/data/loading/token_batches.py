"""Batches of prepared tokens. A batch is a function of the seed and the step alone."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from gpt2.config import Config
from gpt2.data.interfaces import Batch, Dataset, Parts, Source, WeightedBatches
from gpt2.data.loading.packing import PACKINGS, Rows, document_start, hashed
from gpt2.data.tokenizer import Tokenizer
from gpt2.data.tokens import PreparedTokens
from gpt2.errors import UserError
from gpt2.utils.text import format_count

IGNORED = -1
ALL_ROWS = slice(None)


@dataclass(frozen=True)
class TokenDataset(Dataset):
    """The prepared tokens of one corpus or of a mixture of corpora.

    `parts` contains each corpus with its weight. A single corpus has an empty name.
    """

    tokenizer: Tokenizer
    parts: Parts

    @classmethod
    def single(cls, tokens: PreparedTokens) -> "TokenDataset":
        """Return the dataset of one corpus, which has an empty name and the weight 1."""
        return cls(tokens.tokenizer, {"": (Fraction(1), tokens)})

    @property
    def targets_per_byte(self) -> float | None:
        """Targets per byte of validation text, or None if the tokens do not preserve the text.

        For a mixture, the number is 1 divided by the weighted mean of the parts' bytes per target.
        """
        total = 0.0
        for weight, part in self.parts.values():
            if part.bytes_per_target is None:
                return None
            total += float(weight) * part.bytes_per_target
        return 1 / total

    def describe(self) -> dict[str, object]:
        """Return a description of the tokens for a run's data.json; see `Dataset.describe`."""
        descriptions = [part.describe() for _, part in self.parts.values()]
        if "" in self.parts:
            return {**descriptions[0], "parts": []}
        return {"tokenizer": self.tokenizer.name, "parts": descriptions}

    def open(self, config: Config) -> "TokenBatches":
        """Return the batches of a run."""
        return TokenBatches(self, config)


class TokenBatches(Source):
    """The batches of a run on prepared tokens, shuffled without replacement.

    The attribute `rows` contains the training rows of each part (a corpus of the mixture). The rows
    of all parts are also numbered together, over the whole run: a row's number in the run
    determines its part and its number within this part. In every range of rows, the parts occur in
    proportion to their weights, to within a few rows. At steps with a shorter context, each row is
    cut into shorter rows, which follow each other in the same batch.
    """

    def __init__(self, dataset: TokenDataset, config: Config):
        self._dataset = dataset
        self._config = config
        self._context_length = config.model.context_length
        self._shapes = config.shapes
        self._eot = None
        self.rows = dict[str, Rows]()
        # For each part, its weight divided by the sum of the weights of this and all later parts.
        self._ratios = dict[str, Fraction]()
        left = Fraction(1)
        seed = config.seed
        for name, (weight, part) in dataset.parts.items():
            if config.data.document_mask:
                self._eot = document_start(part, "data.document_mask=True")
            # With one seed for all parts, parts of equal size would have the same order.
            if self.rows:
                seed = hashed((seed, len(self.rows)))
            pack = PACKINGS[config.data.packing]
            shuffles = config.data.shuffle_documents
            rows = pack(part, self._context_length, seed, shuffles)
            largest = Fraction(self._shapes.largest.tokens, self._context_length)
            needed = math.ceil(largest * weight)
            if rows.num_rows < needed:
                num_tokens = part.splits["train"].num_tokens
                raise UserError(
                    f"The training split of {num_tokens} tokens has {rows.num_rows} rows of "
                    f"model.context_length={self._context_length}, but a batch needs "
                    f"{needed} rows",
                    "Lower --config.model.context_length, or --config.data.batch_size and the "
                    "sizes in train.batch_schedule",
                )
            self.rows[name] = rows
            self._ratios[name] = weight / left
            left -= weight

    def batch(self, step: int, rows: slice = ALL_ROWS) -> Batch:
        """Return the given `rows` of a step's batch. The first step is step 1."""
        shape = self._shapes.at(step)
        # A row is identified by the index of its first target among all targets of the run.
        start = self._shapes.tokens(step - 1)
        starts = range(start, start + shape.tokens, shape.context_length)
        return assemble(self._read, starts[rows], shape.context_length, self._eot)

    def _read(self, start: int, length: int) -> np.ndarray:
        """Return up to `length` tokens of a row, beginning with the token before a given target.

        `start` is the index of this target among all targets of the run.
        """
        number, offset = divmod(start, self._context_length)
        before = self._count_rows(number)
        after = self._count_rows(number + 1)
        (name,) = (name for name in before if after[name] > before[name])
        row = self.rows[name].read(before[name])
        return row[offset : offset + length]

    def _count_rows(self, number: int) -> dict[str, int]:
        """Return the number of rows of each part among the first `number` rows of the run.

        Each part in turn gets a fraction of the rows that are left, rounded down. The fraction is
        the part's weight divided by the sum of the weights of this part and all later parts. With
        the weights 0.5, 0.3 and 0.2, the parts get 2, 1 and 2 of 5 rows.
        """
        counts = dict[str, int]()
        for name, ratio in self._ratios.items():
            counts[name] = math.floor(number * ratio)
            number -= counts[name]
        return counts

    def validation(
        self, rows: slice, num_batches: int = 0
    ) -> tuple[dict[str, WeightedBatches], float | None]:
        """Return `({part: (weight, batches)}, targets_per_byte)`; see `Source.validation`."""
        train = self._config.train
        validation = dict[str, WeightedBatches]()
        targets_per_byte = self._dataset.targets_per_byte
        for name, (weight, part) in self._dataset.parts.items():
            loader = ValidationLoader(
                part,
                batch_size=self._config.micro_batch_size,
                context_length=self._context_length,
                document_mask=self._config.data.document_mask,
                num_batches=num_batches or train.eval_batches * train.accumulate_steps,
            )
            validation[name] = float(weight), loader.batches(rows)
            if not loader.is_whole:
                targets_per_byte = None
        return validation, targets_per_byte

    def epochs(self, step: int) -> dict[str, float]:
        """Return how many epochs of each part the first `step` steps read, for example 0.5."""
        num_rows = self._shapes.tokens(step) // self._context_length
        counts = self._count_rows(num_rows)
        return {name: counts[name] / self.rows[name].num_rows for name in counts}

    def describe(self, num_steps: int) -> str:
        """Return a line for each part: its epochs, and its numbers of tokens.

        The line contains the number of epochs in `num_steps` steps, and the numbers of tokens in
        the training split and in the validation split.
        """
        lines = list[str]()
        for name, epochs in self.epochs(num_steps).items():
            _, part = self._dataset.parts[name]
            num_tokens = format_count(part.splits["train"].num_tokens)
            num_validation = format_count(part.splits["validation"].num_tokens)
            line = (
                f"{epochs:.2g} epochs of {num_tokens} tokens; {num_validation} tokens"
                " for validation"
            )
            if note := self.rows[name].note:
                line += f"; {note}"
            lines.append(f"{name}: {line}" if name else line)
        return f"\n{'':9}".join(lines)


class ValidationLoader:
    """Batches of the validation split in order. Each token except the first is a target once.

    The last batch is filled up with rows that have no targets. `num_batches` is the largest number
    of batches; 0: no limit. `document_mask` adds the array `segments` to each batch.
    """

    def __init__(
        self,
        tokens: PreparedTokens,
        *,
        batch_size: int,
        context_length: int,
        document_mask: bool = False,
        num_batches: int = 0,
    ):
        self._eot = tokens.tokenizer.eot if document_mask else None
        self._stream = tokens.stream("validation")
        self._batch_size = batch_size
        self._context_length = context_length
        starts = range(0, len(self._stream) - 1, batch_size * context_length)
        self._starts = starts[: num_batches or None]
        self.is_whole = self._starts == starts  # whether the batches cover the split

    def batches(self, rows: slice = ALL_ROWS) -> Iterator[Batch]:
        """Yield all batches in order, each with only the given `rows`."""
        length = self._context_length
        for start in self._starts:
            starts = range(start, start + self._batch_size * length, length)
            yield assemble(self._stream.read, starts[rows], length, self._eot)


def assemble(
    read: Callable[[int, int], np.ndarray],
    starts: Sequence[int],
    length: int,
    eot: int | None,
) -> Batch:
    """Return a batch of arrays `[len(starts), length]`, with a row for each of `starts`.

    `read(start, length + 1)` returns the tokens of a row. All tokens but the last are inputs, and
    all tokens but the first are targets. A row with fewer than `length` + 1 tokens is padded. If
    `eot` is not None, each token `eot` begins a new segment.
    """
    tokens = np.zeros((len(starts), length), np.int32)
    targets = np.full_like(tokens, IGNORED)
    for row, start in enumerate(starts):
        window = read(start, length + 1)
        num_targets = max(len(window) - 1, 0)
        tokens[row, :num_targets] = window[:num_targets]
        targets[row, :num_targets] = window[1:]
    batch = {"tokens": tokens, "targets": targets}
    if eot is not None:
        batch["segments"] = np.cumsum(tokens == eot, axis=1, dtype=np.int32)
    return batch
