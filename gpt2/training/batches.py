"""Batches of a run, on its devices."""

from collections.abc import Callable, Generator
from typing import Any

from gpt2.config import Config
from gpt2.data.dataset import Dataset
from gpt2.data.loader import TrainLoader, ValidationLoader, prefetch
from gpt2.parallel import Backend


class Batches:
    """Reads a run's batches and puts them on the devices ahead of their use.

    Each process reads the rows that its own devices hold.
    """

    def __init__(self, config: Config, dataset: Dataset, backend: Backend):
        self.dataset = dataset
        self._size, micro = config.data.batch_size, config.micro_batch_size
        shape: dict[str, Any] = dict(
            context_length=config.model.context_length, document_mask=config.data.document_mask
        )
        self._train = TrainLoader(dataset, batch_size=self._size, seed=config.seed, **shape)
        self._eval = ValidationLoader(
            dataset, batch_size=micro, num_batches=config.train.eval_batches, **shape
        )

        def placed(loader: TrainLoader | ValidationLoader, size: int) -> Callable[[int], Any]:
            rows = backend.local_rows(size)
            return lambda step: backend.put_batch(loader.batch(step, rows))

        self._train_batch = placed(self._train, self._size)
        self._eval_batch = placed(self._eval, micro)
        # Tokens to predict for each byte of the validation split, if a validation covers all of it.
        whole = dataset.splits["validation"].targets_per_byte if self._eval.is_whole else None
        self.targets_per_byte = whole

    def train(self, start: int, stop: int) -> Generator[Any, None, None]:
        """Yields the batches of the steps from `start` to `stop` - 1, counted from 0."""
        return prefetch(self._train_batch, range(start, stop))

    def epoch_end(self, step: int) -> str:
        """Returns a line if the step, counted from 1, ends epoch 1, 2, 4, 8, ...; else nothing."""
        windows = self._train.num_windows
        epoch, before = (count * self._size // windows for count in (step, step - 1))
        ends = epoch > before and epoch.bit_count() == 1
        return f"epoch {epoch} ends: all {windows:,} windows have been seen" if ends else ""

    def validation(self, number: int = 0) -> Generator[Any, None, None]:
        """Yields the first batches of the validation split; 0: all that a validation has."""
        return prefetch(self._eval_batch, range(number or len(self._eval)))

    def examples(self) -> tuple[Any, Any]:
        """Returns a batch of training and one of validation, to compile for."""
        return self._train_batch(0), self._eval_batch(0)
