"""Token streams -> batches: a batch is a function of the seed and the step alone.

A batch is a dict of numpy arrays [B, T]: `tokens` int32; `targets` int32, the token that follows
each, -1 where there is none to predict; and with `document_mask` also `segments` int32, the
document's number within the row.
"""

import functools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from gpt2.data.dataset import Dataset
from gpt2.errors import UserError

IGNORED = -1
ALL_ROWS = slice(None)

Batch = dict[str, np.ndarray]


class TrainLoader:
    """Training batches, shuffled without replacement.

    An epoch visits every window of `context_length` + 1 tokens once; neighbours share one token.
    Each epoch draws where its first window starts, so that later epochs cut the text elsewhere.
    Any batch of `batch_size` sequences can be read directly; `document_mask` adds `segments`.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        context_length: int,
        seed: int,
        document_mask: bool = False,
    ):
        self._stream = dataset.open("train")
        self._batch_size = batch_size
        self._context_length = context_length
        self._eot = _document_start(dataset) if document_mask else None
        # One window less than would fit leaves room for the offset.
        self.num_windows = max(len(self._stream) // context_length - 1, 0)
        if self.num_windows < batch_size:
            raise UserError(
                f"the training split of {len(self._stream)} tokens has {self.num_windows} windows "
                f"of model.context_length={context_length}, and a batch needs {batch_size}",
                "Lower --config.data.batch_size or --config.model.context_length",
            )
        import grain  # takes most of a second

        # Grain's own per-epoch seeds are seed + epoch: hashing keeps runs of nearby seeds apart.
        self._seed = seed
        order_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._order = grain.MapDataset.range(self.num_windows).shuffle(seed=order_seed)
        self._offset = functools.lru_cache(8)(self._draw_offset)

    def batch(self, step: int, rows: slice = ALL_ROWS) -> Batch:
        """Returns `rows` of the batch of a step, counted from 0."""
        numbers = range(step * self._batch_size, (step + 1) * self._batch_size)[rows]
        T = self._context_length
        starts = [self._offset(i // self.num_windows) + T * self._order[i] for i in numbers]
        return _cut_batch(self._stream, starts, T, self._eot)

    def _draw_offset(self, epoch: int) -> int:
        return int(np.random.default_rng((self._seed, epoch)).integers(self._context_length))


class ValidationLoader:
    """Validation batches, in order: every token but the first is a target exactly once.

    The last batch is filled with rows that have nothing to predict. `num_batches` are at most
    taken, 0: all. `is_whole` tells whether they hold the whole split.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        context_length: int,
        num_batches: int = 0,
        document_mask: bool = False,
    ):
        self._stream = dataset.open("validation")
        self._batch_size = batch_size
        self._context_length = context_length
        self._eot = _document_start(dataset) if document_mask else None
        num_windows = -(-(len(self._stream) - 1) // context_length)
        whole = -(-num_windows // batch_size)
        self._num_batches = min(num_batches, whole) if num_batches else whole
        self.is_whole = self._num_batches == whole

    def __len__(self) -> int:
        return self._num_batches

    def batch(self, index: int, rows: slice = ALL_ROWS) -> Batch:
        """Returns `rows` of a batch, 0 <= index < len(self)."""
        numbers = range(index * self._batch_size, (index + 1) * self._batch_size)[rows]
        T = self._context_length
        return _cut_batch(self._stream, [i * T for i in numbers], T, self._eot)


def _cut_batch(stream, starts: list[int], context_length: int, eot: int | None) -> Batch:
    tokens = np.zeros((len(starts), context_length), np.int32)
    targets = np.full_like(tokens, IGNORED)
    for row, start in enumerate(starts):
        window = stream.read(start, context_length + 1)
        num_targets = max(len(window) - 1, 0)
        tokens[row, :num_targets] = window[:num_targets]
        targets[row, :num_targets] = window[1:]
    batch = {"tokens": tokens, "targets": targets}
    if eot is not None:
        batch["segments"] = np.cumsum(tokens == eot, axis=1, dtype=np.int32)
    return batch


def _document_start(dataset: Dataset) -> int:
    eot = dataset.tokenizer.eot
    if eot is None or dataset.splits["train"].num_documents < 2:
        raise UserError(
            "data.document_mask=True needs several documents, and the corpus is one",
            "Use --config.data.document_mask=False",
        )
    return eot


class Prefetcher:
    """An iterator over device batches that a background thread prepares.

    It is a context manager, which ends the thread. `get_batch(step)` returns a host batch, which
    `put` moves to the devices; at most `depth` wait. Errors are raised where a batch is asked for.
    """

    _END = object()

    def __init__(
        self,
        get_batch: Callable[[int], Batch],
        steps: Iterable[int],
        put: Callable[[Batch], Any],
        depth: int = 2,
    ):
        self._ready: queue.Queue = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._fill, args=(get_batch, steps, put), name="prefetch", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._closed.is_set():
            raise StopIteration
        batch, error = self._ready.get()
        if batch is self._END:
            self.close()
            raise error
        return batch

    def close(self) -> None:
        """Ends the thread and drops the batches that are still waiting."""
        self._closed.set()
        while self._thread.is_alive():
            # A thread that waits to put sees that it should end once the queue has room.
            while not self._ready.empty():
                self._ready.get_nowait()
            self._thread.join(0.01)

    def _fill(self, get_batch: Callable, steps: Iterable[int], put: Callable) -> None:
        end: BaseException = StopIteration()
        try:
            for step in steps:
                self._ready.put((put(get_batch(step)), None))
                if self._closed.is_set():
                    return
        except BaseException as error:
            end = error
        self._ready.put((self._END, end))
