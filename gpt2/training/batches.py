"""Batches of a run, on its devices."""

import functools
import itertools
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from functools import partial

import jax
import numpy as np

from gpt2.config import Config
from gpt2.config.shapes import Shape
from gpt2.data import Dataset
from gpt2.data.loader import Batch as HostBatch
from gpt2.data.loader import TrainLoader, ValidationLoader, prefetch
from gpt2.data.own import OwnBatches
from gpt2.errors import UserError
from gpt2.parallel import Backend, distributed
from gpt2.utils.text import format_count
from gpt2.utils.trees import Batch

HeldOut = dict[str, tuple[float, Iterable[Batch]]]  # by part: its share, its batches


class Batches:
    """A run's batches: each process reads its own devices' rows ahead, and puts them there."""

    def __init__(self, config: Config, dataset: Dataset, backend: Backend):
        self.dataset = dataset
        self._put = backend.put_batch
        self._local_rows = functools.cache(backend.local_rows)
        self._shapes = config.shapes
        self._eval_rows = self._local_rows(config.micro_batch_size)
        self._eval_batches = config.train.eval_batches * config.train.accumulate_steps
        self._held_out = dict[str, tuple[float, ValidationLoader]]()
        self._train: TrainLoader | OwnBatches
        data = config.data
        context_length = config.model.context_length
        if dataset.own:
            if config.train.batch_schedule or config.train.context_schedule:
                raise UserError(f"{data.corpus} gives batches of one shape")
            if data.document_mask or data.packing != "concat":
                raise UserError(
                    f"{data.corpus} would ignore data.document_mask and packing",
                    "Give segments with its batches",
                )
            rows = self._local_rows(data.batch_size)
            self._train = OwnBatches(
                data.corpus,
                dataset.own,
                (rows.stop - rows.start, context_length),
                config.model.vocab_size,
                config.seed,
            )
            return
        self._train = TrainLoader(
            dataset,
            seed=config.seed,
            batch_size=data.batch_size,
            context_length=context_length,
            document_mask=data.document_mask,
            packing=data.packing,
            shapes=config.shapes,
        )
        for name, (share, part) in dataset.parts.items():
            loader = ValidationLoader(
                part,
                batch_size=config.micro_batch_size,
                context_length=context_length,
                document_mask=data.document_mask,
                num_batches=self._eval_batches,
            )
            self._held_out[name] = float(share), loader

    def train(
        self, start: int, stop: int, position: Sequence[str] = ()
    ) -> Generator[Batch, None, None]:
        """Yields the batches of the steps `start` + 1, ..., `stop`.

        `position` is what `position(start)` gave, which only batches of a user's own need.
        """
        if position and isinstance(self._train, OwnBatches):
            if len(position) != jax.process_count():
                raise UserError(
                    f"the checkpoint holds the places of {len(position)} processes in their "
                    "batches",
                    "Start as many",
                )
            self._train.restored = position[jax.process_index()]
        return self._ahead(map(self._read, range(start + 1, stop + 1)))

    def _ahead(self, read: Iterable[HostBatch]) -> Generator[Batch, None, None]:
        """Reads in a thread, and places in this one, so that a step's first run is alone."""
        with closing(prefetch(read)) as batches:
            for batch in batches:
                yield self._put(batch)

    def _read(self, step: int) -> HostBatch:
        rows = self._local_rows(self._shapes.at(step).batch_size)
        return self._train.batch(step, rows)

    def validation(self, number: int = 0) -> tuple[HeldOut, float | None]:
        """Returns each part's share and its first batches; 0: all that a validation has.

        Also tokens to predict for each byte of held-out text, if a validation covers all of it.
        """
        if isinstance(self._train, OwnBatches):
            num_rows = self._eval_rows.stop - self._eval_rows.start
            batches = self._train.validation(num_rows)
            most = number or self._eval_batches or None
            batches = itertools.islice(batches, most)
            return {"": (1.0, self._ahead(batches))}, None
        held_out = HeldOut()
        is_whole = not number
        for name, (share, loader) in self._held_out.items():
            numbers = range(1, 1 + (number or len(loader)))
            read = partial(loader.batch, rows=self._eval_rows)
            held_out[name] = share, self._ahead(map(read, numbers))
            is_whole = is_whole and loader.is_whole
        return held_out, self.dataset.targets_per_byte if is_whole else None

    def examples(self, start: int = 0) -> tuple[dict[Shape, Batch], Batch]:
        """Returns a batch of each shape after `start`, and one of validation."""
        held_out, _ = self.validation(1)
        _, first = next(iter(held_out.values()))
        example = next(iter(first))
        examples = dict[Shape, Batch]()
        for begin in self._shapes.pieces:
            shape = self._shapes.at(max(begin, start) + 1)
            rows = self._local_rows(shape.batch_size)
            size = (rows.stop - rows.start, shape.context_length)
            zeros = {name: np.zeros(size, x.dtype) for name, x in example.items()}
            examples[shape] = self._put(zeros)
        return examples, example

    def position(self, step: int) -> list[str]:
        """Returns what `train` needs to go on after a step, nothing where the step tells all."""
        if isinstance(self._train, OwnBatches):
            return distributed.from_all(self._train.state(step))
        return []

    def describe(self, num_steps: int) -> str:
        """Returns what so many steps read, as text for people."""
        if isinstance(self._train, OwnBatches):
            return "batches of its own"
        lines = list[str]()
        for name, epochs in self._train.epochs(num_steps).items():
            _, part = self.dataset.parts[name]
            num_tokens = format_count(part.splits["train"].num_tokens)
            num_held_out = format_count(part.splits["validation"].num_tokens)
            text = (
                f"{num_tokens} tokens, seen {epochs:.2g} times; {num_held_out} held out"
            )
            note = self._train.sources[name].note
            line = f"{text}; {note}" if note else text
            lines.append(f"{name}: {line}" if name else line)
        return f"\n{'':9}".join(lines)
