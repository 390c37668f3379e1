"""Token streams -> batches: a batch is a function of the seed and the step alone.

A batch is a dict of numpy arrays [B, T]: `tokens` int32; `targets` int32, the token that follows
each, -1 where there is none to predict; and with `document_mask` also `segments` int32, the
document's number within the row.
"""

import abc
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np

from gpt2.data.dataset import Dataset
from gpt2.data.packing import PACKINGS, Rows, document_start
from gpt2.errors import UserError

IGNORED = -1
ALL_ROWS = slice(None)

Batch = dict[str, np.ndarray]


class _Loader(abc.ABC):
    """Puts rows of a split together to batches."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        context_length: int,
        document_mask: bool = False,
    ):
        self._batch_size = batch_size
        self._context_length = context_length
        self._eot = document_start(dataset, "data.document_mask=True") if document_mask else None

    @abc.abstractmethod
    def _read(self, row: int) -> np.ndarray:
        """Returns the tokens of a row of the run, int32; each but the first is a target."""

    def _length(self, step: int) -> int:
        """Returns the length of a batch's rows."""
        return self._context_length

    def batch(self, step: int, rows: slice = ALL_ROWS) -> Batch:
        """Returns `rows` of a batch, counted from 0."""
        numbers = range(step * self._batch_size, (step + 1) * self._batch_size)[rows]
        tokens = np.zeros((len(numbers), self._length(step)), np.int32)
        targets = np.full_like(tokens, IGNORED)
        for row, number in enumerate(numbers):
            window = self._read(number)
            num_targets = max(len(window) - 1, 0)
            tokens[row, :num_targets] = window[:num_targets]
            targets[row, :num_targets] = window[1:]
        batch = {"tokens": tokens, "targets": targets}
        if self._eot is not None:
            batch["segments"] = np.cumsum(tokens == self._eot, axis=1, dtype=np.int32)
        return batch


class TrainLoader(_Loader):
    """Training batches, shuffled without replacement; any can be read directly.

    `sources` are the rows of each part of a mixture, or of the corpus under an empty name. Which of
    them a row is from, and its number there, follow from the row's number: any stretch keeps to the
    shares, to within a few rows. Under `pad`, neighbours of one batch are from one source.
    """

    def __init__(self, dataset: Dataset, *, seed: int, packing: str = "concat", **shape: Any):
        super().__init__(dataset, **shape)
        length, size = self._context_length, self._batch_size
        self._unit = size if packing == "pad" else 1
        self.sources, self._ratios = dict[str, Rows](), list[tuple[int, int]]()
        left, mean_length = Fraction(1), Fraction(0)
        for number, (name, (share, part)) in enumerate(dataset.parts.items()):
            if number:  # else parts of equal size would have one order
                seed = int(np.random.SeedSequence((seed, number)).generate_state(1)[0])
            rows = PACKINGS[packing](part, length, size, seed)
            if rows.num_rows < (needed := math.ceil(size * share)):
                tokens = part.splits["train"].num_tokens
                raise UserError(
                    f"the training split of {tokens} tokens has {rows.num_rows} rows of "
                    f"model.context_length={length}, and a batch needs {needed}",
                    "Lower --config.data.batch_size or --config.model.context_length",
                )
            self.sources[name] = rows
            self._ratios.append((share / left).as_integer_ratio())  # of what the others leave
            left, mean_length = left - share, mean_length + share * Fraction(rows.mean_length)
        self.lengths = sorted({n for rows in self.sources.values() for n in rows.lengths})
        self.tokens_per_step = round(size * mean_length)

    def epochs(self, step: int) -> dict[str, float]:
        """Returns how often each part has been seen after so many steps."""
        left, epochs = step * self._batch_size // self._unit, dict[str, float]()
        for (name, rows), (share, whole) in zip(self.sources.items(), self._ratios, strict=True):
            taken = left * share // whole
            epochs[name], left = taken * self._unit / rows.num_rows, left - taken
        return epochs

    def _find(self, row: int) -> tuple[Rows, int]:
        """Returns the source of a row, and the row's number there."""
        left, within = divmod(row, self._unit)
        for rows, (share, whole) in zip(self.sources.values(), self._ratios, strict=True):
            before = left * share // whole
            if (left + 1) * share // whole > before:
                return rows, before * self._unit + within
            left -= before
        raise AssertionError("the last source takes what the others leave")

    def _length(self, step: int) -> int:
        rows, number = self._find(step * self._batch_size)
        return rows.length(number)

    def _read(self, row: int) -> np.ndarray:
        rows, number = self._find(row)
        return rows.read(number)


class ValidationLoader(_Loader):
    """Validation batches, in order: every token but the first is a target exactly once.

    The last batch is filled with rows that have nothing to predict. `num_batches` are at most
    taken, 0: all. `is_whole` tells whether they hold the whole split.
    """

    def __init__(self, dataset: Dataset, *, num_batches: int = 0, **shape: Any):
        super().__init__(dataset, **shape)
        self._stream = dataset.open("validation")
        num_windows = -(-(len(self._stream) - 1) // self._context_length)
        whole = -(-num_windows // self._batch_size)
        self._num_batches = min(num_batches, whole) if num_batches else whole
        self.is_whole = self._num_batches == whole

    def __len__(self) -> int:
        return self._num_batches

    def _read(self, row: int) -> np.ndarray:
        return self._stream.read(row * self._context_length, self._context_length + 1)


def prefetch(
    make: Callable[[int], Any], steps: Iterable[int], ahead: int = 2
) -> Generator[Any, None, None]:
    """Yields `make(step)` for each step; a thread makes up to `ahead` more meanwhile.

    Errors are raised where a step is asked for.
    """
    pool, waiting = ThreadPoolExecutor(1, "prefetch"), deque[Future]()
    try:
        for step in steps:
            waiting.append(pool.submit(make, step))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
