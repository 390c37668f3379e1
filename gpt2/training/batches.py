"""Batches of a run, on its devices."""

import functools
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing

import jax
import numpy as np

from gpt2.config import Config
from gpt2.config.shapes import StepShape
from gpt2.data import Dataset
from gpt2.data.interfaces import Batch as HostBatch
from gpt2.data.loading.prefetch import prefetch
from gpt2.errors import UserError
from gpt2.parallel import Backend, distributed
from gpt2.utils.trees import Batch

# The weight and the batches of each corpus of a mixture.
Validation = dict[str, tuple[float, Iterable[Batch]]]


class Batches:
    """A run's batches. Each process reads the rows of its devices ahead, and puts them there."""

    def __init__(self, config: Config, dataset: Dataset, backend: Backend):
        self.dataset = dataset
        self._source = dataset.open(config)
        self._put = backend.put_batch
        self._local_rows = functools.cache(backend.local_rows)
        self._shapes = config.shapes
        self._eval_rows = self._local_rows(config.micro_batch_size)
        self.describe = self._source.describe

    def train(
        self, start: int, stop: int, position: Sequence[str] = ()
    ) -> Generator[Batch, None, None]:
        """Yield the batches of the steps `start` + 1, ..., `stop`.

        `position` is what `position(start)` returned, which only a user's batches need.
        """
        if position:
            if len(position) != jax.process_count():
                raise UserError(
                    f"The checkpoint holds the positions of {len(position)} processes in their "
                    f"batches, and this run has {jax.process_count()}",
                    f"Start {len(position)} processes",
                )
            self._source.restore(position[jax.process_index()])
        return self._ahead(map(self._read, range(start + 1, stop + 1)))

    def _ahead(self, batches: Iterable[HostBatch]) -> Generator[Batch, None, None]:
        """Read in a thread, and puts in this one, so that a step's first run is alone."""
        with closing(prefetch(batches)) as read:
            for batch in read:
                yield self._put(batch)

    def _read(self, step: int) -> HostBatch:
        rows = self._local_rows(self._shapes.at(step).batch_size)
        return self._source.batch(step, rows)

    def validation(self, number: int = 0) -> tuple[Validation, float | None]:
        """Return the weight and the first batches of each corpus; 0: of all that are scored.

        Also the targets for each byte of text, if the batches cover all of the validation split.
        """
        validation, targets_per_byte = self._source.validation(self._eval_rows, number)
        placed = Validation()
        for name, (weight, batches) in validation.items():
            placed[name] = weight, self._ahead(batches)
        return placed, targets_per_byte

    def examples(self, start: int = 0) -> tuple[dict[StepShape, Batch], Batch]:
        """Return a batch of each shape after `start`, and one of validation."""
        validation, _ = self.validation(1)
        _, first = next(iter(validation.values()))
        example = next(iter(first))
        examples = dict[StepShape, Batch]()
        for begin in self._shapes.pieces:
            shape = self._shapes.at(max(begin, start) + 1)
            rows = self._local_rows(shape.batch_size)
            size = (rows.stop - rows.start, shape.context_length)
            zeros = {name: np.zeros(size, x.dtype) for name, x in example.items()}
            examples[shape] = self._put(zeros)
        return examples, example

    def position(self, step: int) -> list[str]:
        """Return what `train` needs to continue after a step; empty if the step is enough."""
        position = self._source.position(step)
        return [] if position is None else distributed.from_all(position)
