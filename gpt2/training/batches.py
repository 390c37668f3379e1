"""Batches of a run, on its devices."""

from typing import Any

from gpt2.config import Config
from gpt2.data.dataset import Dataset
from gpt2.data.loader import Prefetcher, TrainLoader, ValidationLoader
from gpt2.parallel import Backend


class Batches:
    """Reads a run's batches and puts them on the devices ahead of their use.

    Each process reads the rows that its own devices hold.
    """

    def __init__(self, config: Config, dataset: Dataset, backend: Backend):
        shape: dict[str, Any] = dict(
            context_length=config.model.context_length, document_mask=config.data.document_mask
        )
        size = config.data.batch_size
        self._train = TrainLoader(dataset, batch_size=size, seed=config.seed, **shape)
        self._eval = ValidationLoader(
            dataset,
            batch_size=config.micro_batch_size,
            num_batches=config.train.eval_batches,
            **shape,
        )
        self.dataset = dataset
        self._train_rows = backend.local_rows(size)
        self._eval_rows = backend.local_rows(config.micro_batch_size)
        self._put = backend.put_batch
        self._batch_size = size
        self.num_eval_batches = len(self._eval)
        # Tokens to predict for each byte of the validation split, if a validation covers all of it.
        whole = dataset.splits["validation"].targets_per_byte if self._eval.is_whole else None
        self.targets_per_byte = whole

    def train(self, start: int, stop: int) -> Prefetcher:
        """Returns the batches of the steps from `start` to `stop` - 1, counted from 0."""
        return Prefetcher(self._train_batch, range(start, stop), self._put)

    def epoch_end(self, step: int) -> str:
        """Returns a line if the step, counted from 1, ends epoch 1, 2, 4, 8, ...; else nothing."""
        windows = self._train.num_windows
        epoch, before = (count * self._batch_size // windows for count in (step, step - 1))
        ends = epoch > before and epoch.bit_count() == 1
        return f"epoch {epoch} ends: all {windows:,} windows have been seen" if ends else ""

    def validation(self, number: int = 0) -> Prefetcher:
        """Returns the first batches of the validation split; 0: all that a validation has."""
        return Prefetcher(self._eval_batch, range(number or self.num_eval_batches), self._put)

    def examples(self) -> tuple[Any, Any]:
        """Returns a batch of training and one of validation, to compile for."""
        return self._put(self._train_batch(0)), self._put(self._eval_batch(0))

    def _train_batch(self, step: int) -> dict:
        return self._train.batch(step, self._train_rows)

    def _eval_batch(self, index: int) -> dict:
        return self._eval.batch(index, self._eval_rows)
