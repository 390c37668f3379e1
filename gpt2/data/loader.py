"""Token streams -> batches: a batch is a function of the seed and the step alone.

A batch is a dict of numpy arrays [B, T]: `tokens` int32; `targets` int32, the token that follows
each, -1 where there is none to predict; and with `document_mask` also `segments` int32, the
document's number within the row. Batches are counted 1, 2, 3, ..., as steps are.
"""

import contextlib
import math
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from fractions import Fraction
from typing import TypeVar

import numpy as np

from gpt2 import signals
from gpt2.config.shapes import Shape, Shapes
from gpt2.data.dataset import Dataset
from gpt2.data.packing import PACKINGS, Rows, document_start, hashed
from gpt2.errors import UserError

IGNORED = -1
ALL_ROWS = slice(None)

Batch = dict[str, np.ndarray]
T = TypeVar("T")


def assemble(
    read: Callable[[int, int], np.ndarray],
    places: Sequence[int],
    length: int,
    eot: int | None,
) -> Batch:
    """Makes a batch of the rows that begin at places; `eot` begins a new segment.

    `read` returns the tokens at a place, up to a number of them.
    """
    tokens = np.zeros((len(places), length), np.int32)
    targets = np.full_like(tokens, IGNORED)
    for row, place in enumerate(places):
        window = read(place, length + 1)
        num_targets = max(len(window) - 1, 0)
        tokens[row, :num_targets] = window[:num_targets]
        targets[row, :num_targets] = window[1:]
    batch = {"tokens": tokens, "targets": targets}
    if eot is not None:
        batch["segments"] = np.cumsum(tokens == eot, axis=1, dtype=np.int32)
    return batch


class TrainLoader:
    """Training batches, shuffled without replacement; any can be read directly.

    `sources` are the rows of each part of a mixture, or of the corpus under an empty name. Which of
    them a row is from, and its number there, follow from the row's number: any stretch keeps to the
    shares, to within a few rows. Where `shapes` have shorter contexts, neighbours of one batch are
    parts of a row, one after another.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        seed: int,
        batch_size: int,
        context_length: int,
        document_mask: bool = False,
        packing: str = "concat",
        shapes: Shapes | None = None,
    ):
        self._eot = None
        if document_mask:
            self._eot = document_start(dataset, "data.document_mask=True")
        self._context_length = context_length
        self._shapes = shapes or Shapes({0: Shape(batch_size, context_length, 0)})
        self.sources = dict[str, Rows]()
        # Of each source, its share of what the sources before it leave.
        self._ratios = dict[str, tuple[int, int]]()
        left = Fraction(1)
        for number, (name, (share, part)) in enumerate(dataset.parts.items()):
            if number:  # else parts of equal size would have one order
                seed = hashed((seed, number))
            rows = PACKINGS[packing](part, context_length, seed)
            largest = self._shapes.largest.tokens // context_length
            needed = math.ceil(largest * share)
            if rows.num_rows < needed:
                num_tokens = part.splits["train"].num_tokens
                raise UserError(
                    f"the training split of {num_tokens} tokens has {rows.num_rows} rows of "
                    f"model.context_length={context_length}, and a batch needs {needed}",
                    "Lower --config.data.batch_size or --config.model.context_length",
                )
            self.sources[name] = rows
            self._ratios[name] = (share / left).as_integer_ratio()
            left -= share

    def epochs(self, step: int) -> dict[str, float]:
        """Returns how often each part has been seen after so many steps."""
        left = self._shapes.tokens(step) // self._context_length
        epochs = dict[str, float]()
        for name, rows in self.sources.items():
            share, whole = self._ratios[name]
            taken = left * share // whole
            epochs[name] = taken / rows.num_rows
            left -= taken
        return epochs

    def batch(self, step: int, rows: slice = ALL_ROWS) -> Batch:
        """Returns `rows` of the batch of a step."""
        shape = self._shapes.at(step)
        # Rows are told by where they begin among all targets of a run.
        start = self._shapes.tokens(step - 1)
        places = range(start, start + shape.tokens, shape.context_length)
        return assemble(self._read, places[rows], shape.context_length, self._eot)

    def _read(self, place: int, length: int) -> np.ndarray:
        """Returns so many tokens, or as many as there are, of the row at a place."""
        left, start = divmod(place, self._context_length)
        for name, (share, whole) in self._ratios.items():
            rows = self.sources[name]
            number = left * share // whole
            if (left + 1) * share // whole > number:
                break  # by the last source, which takes what the others leave
            left -= number
        return rows.read(number)[start : start + length]


class ValidationLoader:
    """Validation batches, in order: every token but the first is a target exactly once.

    The last batch is filled with rows that have nothing to predict. `num_batches` are at most
    taken, 0: all.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        context_length: int,
        document_mask: bool = False,
        num_batches: int = 0,
    ):
        # A part of a mixture may be one document.
        self._eot = dataset.tokenizer.eot if document_mask else None
        self._stream = dataset.open("validation")
        self._batch_size = batch_size
        self._context_length = context_length
        whole = -(-(len(self._stream) - 1) // (batch_size * context_length))
        self._num_batches = min(num_batches or whole, whole)
        self.is_whole = self._num_batches == whole  # whether it holds the whole split

    def __len__(self) -> int:
        return self._num_batches

    def batch(self, number: int, rows: slice = ALL_ROWS) -> Batch:
        """Returns `rows` of a batch."""
        length = self._context_length
        size = self._batch_size * length
        places = range((number - 1) * size, number * size, length)
        return assemble(self._stream.read, places[rows], length, self._eot)


def prefetch(batches: Iterable[T]) -> Generator[T, None, None]:
    """Yields from `batches`; a thread takes up to two more meanwhile.

    Its errors are raised where a batch is asked for. The thread may wait for a text that never
    comes: nobody waits for it for long, and a signal that stops the run is raised as `Stopped`.
    """
    ready = queue.Queue[T | BaseException | None](1)  # one more is in its hand
    is_closed = threading.Event()

    def read() -> None:
        end = None
        try:
            for batch in batches:
                ready.put(batch)
                if is_closed.is_set():
                    return
        except BaseException as error:
            end = error
        ready.put(end)

    reader = threading.Thread(target=read, name="prefetch", daemon=True)
    reader.start()
    try:
        while (batch := signals.get_unless_stopped(ready)) is not None:
            if isinstance(batch, BaseException):
                raise batch
            yield batch
    finally:
        is_closed.set()
        with contextlib.suppress(queue.Empty):
            ready.get_nowait()  # for which the thread may wait to put another
        reader.join(timeout=1)
