"""Batches of a run, on its devices."""

import functools
import itertools
from collections.abc import Generator, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from gpt2.config import Config
from gpt2.config.shapes import Shape
from gpt2.data.dataset import Dataset
from gpt2.data.loader import TrainLoader, ValidationLoader, prefetch
from gpt2.data.own import OwnBatches
from gpt2.errors import UserError
from gpt2.parallel import Backend, distributed
from gpt2.utils.text import format_count

HeldOut = dict[str, tuple[float, Iterable[Any]]]


class Batches:
    """A run's batches: each process reads its own devices' rows, and puts them there ahead."""

    def __init__(self, config: Config, dataset: Dataset, backend: Backend):
        self.dataset = dataset
        self._put = backend.put_batch
        data = config.data
        self._local_rows = functools.cache(backend.local_rows)
        self._shapes = config.shapes
        self._num_steps = config.train.num_steps
        micro = config.micro_batch_size
        self._eval_rows = self._local_rows(micro)
        length = config.model.context_length
        self._most = config.train.eval_batches or None
        if dataset.own:
            fixed = config.train.batch_schedule or config.train.context_schedule
            if fixed:
                raise UserError(f"{data.corpus} gives batches of one shape")
            rows = self._local_rows(data.batch_size)
            vocab_size = config.model.vocab_size
            shape = rows.stop - rows.start, length
            self._train: Any = OwnBatches(data.corpus, dataset.own, shape, vocab_size)
            return
        options: dict[str, Any] = dict(
            context_length=length, document_mask=data.document_mask
        )
        order: dict[str, Any] = dict(batch_size=data.batch_size, shapes=config.shapes)
        order |= dict(seed=config.seed, packing=data.packing)
        self._train = TrainLoader(dataset, **order, **options)
        options |= dict(batch_size=micro, num_batches=config.train.eval_batches)
        self._held_out = {
            name: (float(share), ValidationLoader(part, **options))
            for name, (share, part) in dataset.parts.items()
        }

    def tokens_of(self, shape: Shape) -> int:
        """Returns the tokens of a step of a shape."""
        return shape.tokens if self.dataset.own else self._train.tokens_of(shape)

    @property
    def phase(self) -> str:
        """What a wait for a batch counts as: it may take as long as a preparation."""
        growths = [
            part.growth for _, part in self.dataset.parts.values() if part.growth
        ]
        return (
            "data wait" if all(each.whole.done() for each in growths) else "preparation"
        )

    def _read(self, step: int) -> Any:
        rows = self._local_rows(self._shapes.at(step + 1).batch_size)
        return self._put(self._train.batch(step, rows))

    def train(
        self, start: int, stop: int, position: Sequence[str] = ()
    ) -> Generator[Any, None, None]:
        """Yields the batches of the steps from `start` to `stop` - 1, counted from 0.

        `position` is what `position(start)` gave, which only batches of a user's own need.
        """
        if position:
            what = f"the checkpoint holds the places of {len(position)} processes in their batches"
            if len(position) != jax.process_count():
                raise UserError(what, "Start as many")
            self._train.restored = position[jax.process_index()]
        return prefetch(self._read, range(start, stop))

    def validation(self, number: int = 0) -> tuple[HeldOut, float | None]:
        """Returns each part's share and its first batches; 0: all that a validation has.

        Also tokens to predict for each byte of held-out text, if a validation covers all of it.
        """
        if self.dataset.own:
            batches = self._train.validation(
                self._eval_rows.stop - self._eval_rows.start
            )
            first = itertools.islice(batches, number or self._most)
            return {"": (1.0, map(self._put, first))}, None
        read = lambda part, step: self._put(part.batch(step, self._eval_rows))  # noqa: E731
        held_out: HeldOut = {
            name: (share, prefetch(partial(read, part), range(number or len(part))))
            for name, (share, part) in self._held_out.items()
        }
        is_whole = not number and all(
            loader.is_whole for _, loader in self._held_out.values()
        )
        return held_out, self.dataset.targets_per_byte if is_whole else None

    def examples(self, start: int = 0) -> tuple[dict[Shape, Any], Any]:
        """Returns a batch of each shape after `start`, and one of validation."""
        ((_, held_out), *_) = self.validation(1)[0].values()
        held_out = next(iter(held_out))
        examples = dict[Shape, Any]()
        begins = (
            begin for begin in self._shapes.pieces if start < begin < self._num_steps
        )
        for shape in (self._shapes.at(begin + 1) for begin in (start, *begins)):
            rows = self._local_rows(shape.batch_size)
            for length in {
                min(length, shape.context_length) for length in self._train.lengths
            }:
                zeros = np.zeros((rows.stop - rows.start, length), np.int32)
                each = self._put(dict.fromkeys(held_out, zeros))
                examples[shape._replace(context_length=length)] = each
        return examples, held_out

    def position(self, step: int) -> list[str]:
        """Returns what `train` needs to go on after a step, nothing where the step tells all."""
        return distributed.from_all(self._train.state(step)) if self.dataset.own else []

    def describe(self, num_steps: int) -> str:
        """Returns what so many steps read, as text for people."""
        lines = list[str]()
        for name, epochs in self._train.epochs(num_steps).items():
            splits = self.dataset.parts[name][1].splits
            note = self._train.sources[name].note
            tokens, held = (
                format_count(splits[n].num_tokens) for n in ("train", "validation")
            )
            text = f"{tokens} tokens, seen {epochs:.2g} times; {held} held out"
            if self.dataset.parts[name][1].growth:
                text = (
                    f"{tokens} tokens so far, {held} held out; more are being prepared"
                )
            lines.append(f"{name}: " * bool(name) + text + f"; {note}" * bool(note))
        return f"\n{'':9}".join(lines) or "batches of its own"

    def epoch_end(self, step: int) -> str:
        """Returns a line if the step, counted from 1, ends epoch 1, 2, 4, 8, ...; else nothing."""
        lines = list[str]()
        before = self._train.epochs(step - 1)
        for name, epochs in self._train.epochs(step).items():
            if (epoch := int(epochs)).bit_length() > int(before[name]).bit_length():
                which = f" of {name}" * bool(name)
                rows = self._train.sources[name].num_rows
                lines.append(
                    f"epoch {epoch}{which} ends: all {rows:,} rows have been seen"
                )
        return "; ".join([*lines, "the next one has another order"] if lines else [])
