"""Batches of a run, on its devices."""

from typing import Any

from gpt2.config import Config
from gpt2.data.dataset import Dataset
from gpt2.data.loader import Prefetcher, TrainLoader, ValidationLoader
from gpt2.parallel import Backend
from gpt2.utils.text import counted


class Feed:
    """Reads a run's batches and puts them on the devices ahead of their use.

    Each process reads the rows that its own devices hold.

    Args:
        config: of the run.
        dataset: the prepared corpus.
        backend: which places batches.

    Attributes:
        dataset: as given.
        num_eval_batches: batches in a validation.
        eval_is_whole: whether a validation covers the whole split.
        targets_per_byte: tokens to predict for each byte of the validation split.

    Raises:
        UserError: a split is smaller than a batch, or has no documents to mask.
    """

    def __init__(self, config: Config, dataset: Dataset, backend: Backend):
        shape: dict[str, Any] = dict(
            context_length=config.model.context_length, document_mask=config.data.document_mask
        )
        self._train = TrainLoader(
            dataset, batch_size=config.data.batch_size, seed=config.seed, **shape
        )
        self._eval = ValidationLoader(
            dataset,
            batch_size=config.micro_batch_size,
            num_batches=config.train.eval_batches,
            **shape,
        )
        self.dataset = dataset
        self._batch_size, self._log_every = config.data.batch_size, config.train.log_every
        self._train_rows = backend.local_rows(config.data.batch_size)
        self._eval_rows = backend.local_rows(config.micro_batch_size)
        self._put = backend.put_batch
        self.num_eval_batches = len(self._eval)
        self.eval_is_whole = self._eval.is_whole
        self.targets_per_byte = dataset.splits["validation"].targets_per_byte

    def train_batches(self, start: int, stop: int) -> Prefetcher:
        """Returns the batches of the steps from `start` to `stop` - 1, counted from 0."""
        return Prefetcher(self._train_batch, range(start, stop), self._put)

    def epoch_end(self, step: int) -> str:
        """Returns what to say if the step, counted from 1, ends an epoch; else an empty text.

        Of epochs with fewer steps than lie between two lines of metrics, it tells of the first,
        the second, the fourth and so on: more lines would hide the metrics.
        """
        windows = self._train.num_windows
        epoch, before = (count * self._batch_size // windows for count in (step, step - 1))
        is_short = windows < self._log_every * self._batch_size
        if epoch == before or (is_short and epoch.bit_count() > 1):
            return ""
        return f"step {step} ends epoch {epoch}: all {counted(windows, 'window')} have been seen"

    def eval_batches(self, number: int) -> Prefetcher:
        """Returns the first batches of the validation split."""
        return Prefetcher(self._eval_batch, range(number), self._put)

    def examples(self) -> tuple[Any, Any]:
        """Returns a batch of training and one of validation, to compile for."""
        return self._put(self._train_batch(0)), self._put(self._eval_batch(0))

    def _train_batch(self, step: int) -> dict:
        return self._train.batch(step, self._train_rows)

    def _eval_batch(self, index: int) -> dict:
        return self._eval.batch(index, self._eval_rows)
