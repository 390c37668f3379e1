"""Token streams -> batches: a batch is a function of the seed and the step alone.

A batch is a dict of numpy arrays [B, T]: `tokens` int32; `targets` int32, the token that follows
each, -1 where there is none to predict; and with `document_mask` also `segments` int32, the
document's number within the row.
"""

import abc
import functools
import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, thread
from fractions import Fraction
from typing import Any

import numpy as np

from gpt2.config.shapes import Shape, Shapes
from gpt2.data.dataset import Dataset
from gpt2.data.packing import PACKINGS, Rows, document_start
from gpt2.errors import UserError

# A worker that the thread of `prefetch` forks would join that thread at its end, and fail.
os.register_at_fork(after_in_child=thread._threads_queues.clear)  # type: ignore[attr-defined]
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
        self._eot = (
            document_start(dataset, "data.document_mask=True")
            if document_mask
            else None
        )

    @abc.abstractmethod
    def _read(self, place: int, length: int) -> np.ndarray:
        """Returns up to `length` + 1 tokens of a row, int32; each but the first is a target."""

    def _places(self, step: int) -> tuple[range, int]:
        """Returns where a batch's rows begin among all targets of a run, and their length."""
        length = self._context_length
        size = self._batch_size * self._context_length
        return range(step * size, (step + 1) * size, length), length

    def batch(self, step: int, rows: slice = ALL_ROWS) -> Batch:
        """Returns `rows` of a batch, counted from 0."""
        places, length = self._places(step)
        tokens = np.zeros((len(places[rows]), length), np.int32)
        targets = np.full_like(tokens, IGNORED)
        for row, place in enumerate(places[rows]):
            window = self._read(place, length)
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
    shares, to within a few rows. Under `pad`, neighbours of one batch are from one source. Where
    `shapes` have shorter contexts, neighbours of one batch are parts of a row, one after another.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        seed: int,
        packing: str = "concat",
        shapes: Shapes | None = None,
        **shape: Any,
    ):
        super().__init__(dataset, **shape)
        length = self._context_length
        size = self._batch_size
        self._shapes = shapes or Shapes({0: Shape(size, length, 0)})
        self._unit = size if packing == "pad" else 1
        self.sources = dict[str, Rows]()
        self._ratios = list[tuple[int, int]]()
        left = Fraction(1)
        mean_length = Fraction(0)
        for number, (name, (share, part)) in enumerate(dataset.parts.items()):
            if number:  # else parts of equal size would have one order
                seed = int(np.random.SeedSequence((seed, number)).generate_state(1)[0])
            rows = PACKINGS[packing](part, length, size, seed)
            needed = math.ceil(self._shapes.largest.tokens // length * share)
            if rows.wait(needed) < needed:
                tokens = part.splits["train"].num_tokens
                raise UserError(
                    f"the training split of {tokens} tokens has {rows.num_rows} rows of "
                    f"model.context_length={length}, and a batch needs {needed}",
                    "Lower --config.data.batch_size or --config.model.context_length",
                )
            self.sources[name] = rows
            self._ratios.append(
                (share / left).as_integer_ratio()
            )  # of what the others leave
            left = left - share
            mean_length = mean_length + share * Fraction(rows.mean_length)
        self.lengths = sorted(
            {n for rows in self.sources.values() for n in rows.lengths}
        )
        self._filled = mean_length / length

    def tokens_of(self, shape: Shape) -> int:
        """Returns the tokens of a step, the mean of all where rows have several lengths."""
        return round(shape.tokens * self._filled)

    def epochs(self, step: int) -> dict[str, float]:
        """Returns how often each part has been seen after so many steps."""
        left = self._shapes.tokens(step) // self._context_length // self._unit
        epochs = dict[str, float]()
        for (name, rows), (share, whole) in zip(
            self.sources.items(), self._ratios, strict=True
        ):
            taken = left * share // whole
            epochs[name], left = taken * self._unit / rows.num_rows, left - taken
        return epochs

    def _find(self, place: int) -> tuple[Rows, int]:
        """Returns the source of the row at a place, and the row's number there."""
        left, within = divmod(place // self._context_length, self._unit)
        for rows, (share, whole) in zip(
            self.sources.values(), self._ratios, strict=True
        ):
            before = left * share // whole
            if (left + 1) * share // whole > before:
                return rows, before * self._unit + within
            left -= before
        raise AssertionError("the last source takes what the others leave")

    def _places(self, step: int) -> tuple[range, int]:
        shape = self._shapes.at(step + 1)
        start = self._shapes.tokens(step)
        rows, number = self._find(start)
        places = range(start, start + shape.tokens, shape.context_length)
        return places, min(rows.length(number), shape.context_length)

    def _read(self, place: int, length: int) -> np.ndarray:
        rows, number = self._find(place)
        start = place % self._context_length
        return rows.read(number)[start : start + length + 1]


class ValidationLoader(_Loader):
    """Validation batches, in order: every token but the first is a target exactly once.

    The last batch is filled with rows that have nothing to predict. `num_batches` are at most
    taken, 0: all.
    """

    def __init__(self, dataset: Dataset, *, num_batches: int = 0, **shape: Any):
        super().__init__(dataset, **shape)
        self._stream = dataset.open("validation")
        self._most = num_batches or math.inf

    @functools.cached_property
    def _num_whole(self) -> int:
        size = self._batch_size * self._context_length
        return -(-(self._stream.wait((self._most + 1) * size) - 1) // size)

    @property
    def is_whole(self) -> bool:
        """Whether the batches hold the whole split."""
        return self._most >= self._num_whole

    def __len__(self) -> int:
        return int(min(self._most, self._num_whole))

    def _read(self, place: int, length: int) -> np.ndarray:
        return self._stream.read(place, length + 1)


def prefetch(
    make: Callable[[int], Any], steps: Iterable[int], ahead: int = 2
) -> Generator[Any, None, None]:
    """Yields `make(step)` for each step; a thread makes up to `ahead` more meanwhile.

    Errors are raised where a step is asked for.
    """
    pool = ThreadPoolExecutor(1, "prefetch")
    waiting = deque[Future]()
    try:
        for step in steps:
            waiting.append(pool.submit(make, step))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
