"""The batches of a run, placed on its devices."""

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

# Name of a corpus in a mixture -> its weight and its batches. A single corpus has an empty name.
Validation = dict[str, tuple[float, Iterable[Batch]]]


class Batches:
    """The batches of a run. Each process reads the rows of its own devices, ahead of time."""

    def __init__(self, config: Config, dataset: Dataset, backend: Backend):
        self.dataset = dataset
        self._source = dataset.open(config)
        self._put = backend.put_batch
        self._local_rows = functools.cache(backend.local_rows)
        self._shapes = config.shapes
        self._eval_rows = self._local_rows(config.micro_batch_size)
        self._refuse_shared_rows(config.micro_batch_size)

    def _refuse_shared_rows(self, micro_batch_size: int) -> None:
        """Raise a UserError if several processes need the same rows of a user's batches.

        Each process calls the user's batch function itself, and could get different values.
        """
        rows = self._eval_rows
        num_rows = (rows.stop - rows.start) * jax.process_count()
        if num_rows > micro_batch_size and not self.dataset.parts:
            raise UserError(
                "parallel.tensor divides the model between processes, so several processes need "
                "the same rows of a batch. But each process calls your batch function itself, and "
                "could get different rows",
                "Set parallel.tensor to at most the number of devices of a process",
            )

    def describe(self, num_steps: int) -> str:
        """Return a description of the data that `num_steps` steps read."""
        return self._source.describe(num_steps)

    def train(
        self, start: int, stop: int, position: Sequence[str] = ()
    ) -> Generator[Batch, None, None]:
        """Yield the batches of the steps `start` + 1, ..., `stop`.

        `position` is the list that the method `position` returned after step `start`. An empty list
        means that the batches depend only on the step.
        """
        if any(position):
            if len(position) != jax.process_count():
                raise UserError(
                    f"The checkpoint was saved by {len(position)} processes, each with its own "
                    f"position in the data, but this run has {jax.process_count()} processes",
                    f"Start {len(position)} processes",
                )
            self._source.restore(position[jax.process_index()])
        return self._ahead(map(self._read, range(start + 1, stop + 1)))

    def _ahead(self, batches: Iterable[HostBatch]) -> Generator[Batch, None, None]:
        """Read batches in another thread, but put them on the devices in this thread.

        While a step runs for the first time, no other thread may use the devices: see `run_alone`.
        """
        with closing(prefetch(batches)) as read:
            for batch in read:
                yield self._put(batch)

    def _read(self, step: int) -> HostBatch:
        rows = self._local_rows(self._shapes.at(step).batch_size)
        return self._source.batch(step, rows)

    def validation(self, number: int = 0) -> tuple[Validation, float | None]:
        """Return `({corpus: (weight, batches)}, targets_per_byte)` for the validation split.

        `number` limits the batches of each corpus. If it is 0, the run's options limit them.
        `targets_per_byte` is the number of targets for each byte of text, or None if it is not
        known or if the batches do not cover the whole text.
        """
        validation, targets_per_byte = self._source.validation(self._eval_rows, number)
        placed = Validation()
        for name, (weight, batches) in validation.items():
            placed[name] = weight, self._ahead(batches)
        return placed, targets_per_byte

    def examples(self, start: int = 0) -> tuple[dict[StepShape, Batch], Batch]:
        """Return examples of batches, with which the steps after `start` can be compiled.

        The first result maps each shape of these steps to a batch of zeros. The second result is a
        validation batch.
        """
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
        """Return the position of each process in its data after a step.

        A position is a string that only the source of the data can interpret (`Source.position`).
        Return an empty list if the batches depend only on the step.
        """
        position = self._source.position(step)
        return [] if position is None else distributed.from_all(position)
