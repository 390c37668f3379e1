"""Token streams -> batches: a batch is a function of the seed and the step alone.

A batch is a dict of numpy arrays [B, T]: `tokens` int32; `targets` int32, the token that follows
each, -1 where there is none to predict; and with `document_mask` also `segments` int32, the
document's number within the row.
"""

import abc
import functools
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from gpt2.data.dataset import Dataset
from gpt2.errors import UserError

IGNORED = -1
ALL_ROWS = slice(None)

Batch = dict[str, np.ndarray]


class _Loader(abc.ABC):
    """Cuts a split into batches."""

    def __init__(
        self,
        dataset: Dataset,
        split: str,
        *,
        batch_size: int,
        context_length: int,
        document_mask: bool = False,
    ):
        self._stream = dataset.open(split)
        self._batch_size = batch_size
        self._context_length = context_length
        self._eot = _document_start(dataset) if document_mask else None

    @abc.abstractmethod
    def _start(self, row: int) -> int:
        """Returns the token at which a row of the run starts."""

    def batch(self, step: int, rows: slice = ALL_ROWS) -> Batch:
        """Returns `rows` of a batch, counted from 0."""
        numbers = range(step * self._batch_size, (step + 1) * self._batch_size)[rows]
        tokens = np.zeros((len(numbers), self._context_length), np.int32)
        targets = np.full_like(tokens, IGNORED)
        for row, number in enumerate(numbers):
            window = self._stream.read(self._start(number), self._context_length + 1)
            num_targets = max(len(window) - 1, 0)
            tokens[row, :num_targets] = window[:num_targets]
            targets[row, :num_targets] = window[1:]
        batch = {"tokens": tokens, "targets": targets}
        if self._eot is not None:
            batch["segments"] = np.cumsum(tokens == self._eot, axis=1, dtype=np.int32)
        return batch


class TrainLoader(_Loader):
    """Training batches, shuffled without replacement; any can be read directly.

    An epoch visits every window of `context_length` + 1 tokens once; neighbours share one token.
    Each epoch draws where its first window starts, so that later epochs cut the text elsewhere.
    """

    def __init__(self, dataset: Dataset, *, seed: int, **shape: Any):
        super().__init__(dataset, "train", **shape)
        # One window less than would fit leaves room for the offset.
        self.num_windows = max(len(self._stream) // self._context_length - 1, 0)
        if self.num_windows < self._batch_size:
            raise UserError(
                f"the training split of {len(self._stream)} tokens has {self.num_windows} windows "
                f"of model.context_length={self._context_length}, and a batch needs "
                f"{self._batch_size}",
                "Lower --config.data.batch_size or --config.model.context_length",
            )
        import grain  # takes most of a second

        # Grain's own per-epoch seeds are seed + epoch: hashing keeps runs of nearby seeds apart.
        self._seed = seed
        order_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._order = grain.MapDataset.range(self.num_windows).shuffle(seed=order_seed)
        self._offset = functools.lru_cache(8)(self._draw_offset)

    def _start(self, row: int) -> int:
        return self._offset(row // self.num_windows) + self._context_length * self._order[row]

    def _draw_offset(self, epoch: int) -> int:
        return int(np.random.default_rng((self._seed, epoch)).integers(self._context_length))


class ValidationLoader(_Loader):
    """Validation batches, in order: every token but the first is a target exactly once.

    The last batch is filled with rows that have nothing to predict. `num_batches` are at most
    taken, 0: all. `is_whole` tells whether they hold the whole split.
    """

    def __init__(self, dataset: Dataset, *, num_batches: int = 0, **shape: Any):
        super().__init__(dataset, "validation", **shape)
        num_windows = -(-(len(self._stream) - 1) // self._context_length)
        whole = -(-num_windows // self._batch_size)
        self._num_batches = min(num_batches, whole) if num_batches else whole
        self.is_whole = self._num_batches == whole

    def __len__(self) -> int:
        return self._num_batches

    def _start(self, row: int) -> int:
        return row * self._context_length


def _document_start(dataset: Dataset) -> int:
    eot = dataset.tokenizer.eot
    if eot is None or dataset.splits["train"].num_documents < 2:
        raise UserError(
            "data.document_mask=True needs several documents, and the corpus is one",
            "Use --config.data.document_mask=False",
        )
    return eot


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
