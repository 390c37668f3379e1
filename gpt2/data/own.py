"""Batches of a user's own: what `python:MODULE:FUNCTION` gives if FUNCTION takes `split`."""

import base64
import functools
import inspect
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from gpt2.data.corpus import import_function
from gpt2.data.loader import ALL_ROWS, IGNORED, Batch
from gpt2.errors import UserError, warn

KEPT = 16  # states, which is more than batches are read ahead

# A function of `split`, and maybe of `seed`.
MakeBatches = Callable[..., Iterable[object]]


def find_batches(corpus: str) -> MakeBatches | None:
    """Returns the user's function that gives batches, if `data.corpus` names one."""
    prefix, _, argument = corpus.partition(":")
    if prefix != "python":
        return None
    function = import_function(argument)
    return function if "split" in inspect.signature(function).parameters else None


class OwnBatches:
    """The batches of a user's function, one after another; it is called again at their end.

    State is Grain's (`get_state` and `set_state` of the iterator) or torchdata's (`state_dict` and
    `load_state_dict` of the iterable). `state` is what continues after so many steps.
    """

    def __init__(
        self,
        corpus: str,
        make: MakeBatches,
        shape: tuple[int, int],
        vocab_size: int,
        seed: int = 0,
    ):
        self._corpus = corpus
        takes_seed = "seed" in inspect.signature(make).parameters
        self._make = functools.partial(make, seed=seed) if takes_seed else make
        self._shape = shape
        # The least and the largest number of each array.
        self._ranges = {
            "tokens": (0, vocab_size - 1),
            "targets": (IGNORED, vocab_size - 1),
            "mask": (0, 1),
            "segments": (0, 2**31 - 1),
        }
        self._taken: int | None = None  # steps
        self._states = dict[int, str]()  # by the steps before them
        self.restored = ""  # a state, with which the first batch begins

    def state(self, step: int) -> str:
        """Returns the state after so many steps, empty where the iterable has none."""
        return self._states.get(step, "")

    def batch(self, step: int, rows: slice = ALL_ROWS) -> Batch:
        """Returns the batch of a step: this process's `rows`. Steps come in order, once."""
        if self._taken is None:
            if step > 1 and not self.restored:
                warn(f"{self._corpus} keeps no place: step {step} has its first batch")
            self._batches = self._repeat(self.restored)
        elif step != self._taken + 1:
            raise UserError(f"{self._corpus} gives its batches only once")
        found = next(self._batches)
        self._taken = step
        if self._get_state:
            pickled = pickle.dumps(self._get_state())
            self._states[step] = base64.b64encode(pickled).decode()
            self._states.pop(step - KEPT, None)
        # The last batch of an epoch may be short, as PyTorch's is. The first of a run is a mistake.
        return self._enter(found, may_be_short=step > 1)

    def validation(self, num_rows: int) -> Iterator[Batch]:
        """Yields the batches held out, so many rows at a time."""
        for found in self._read("validation"):
            batch = self._enter(found, may_be_short=True)
            for start in range(0, self._shape[0], num_rows):
                rows = slice(start, start + num_rows)
                yield {name: array[rows] for name, array in batch.items()}

    def _repeat(self, state: str) -> Iterator[object]:
        """Yields the user's batches of training for ever, from a state on."""
        while True:
            yield from self._read("train", state)
            state = ""

    def _read(self, split: str, state: str = "") -> Iterator[object]:
        """Yields the user's batches of a split once, from a state on."""
        source = self._make(split=split)
        kept = pickle.loads(base64.b64decode(state)) if state else None
        if state and hasattr(source, "load_state_dict"):
            source.load_state_dict(kept)
        iterator = iter(source)
        if state and hasattr(iterator, "set_state"):
            iterator.set_state(kept)
        if split == "train":
            states = getattr(source, "state_dict", None)
            self._get_state = getattr(iterator, "get_state", states)
        is_empty = not state
        for found in iterator:
            is_empty = False
            yield found
        if is_empty:
            raise UserError(f"{self._corpus} gives no batches for split={split}")

    def _enter(self, batch: object, *, may_be_short: bool) -> Batch:
        """Returns a user's batch as ours, where it cannot be mistaken for another.

        Rows that it lacks, which `may_be_short` allows, have nothing to predict.
        """
        known = self._ranges.keys()
        if (
            not isinstance(batch, Mapping)
            or not {"tokens", "targets"} <= {*batch} <= known
        ):
            raise UserError(f"{self._corpus} has to give dicts of {', '.join(known)}")
        arrays = {name: self._enter_array(name, batch[name]) for name in batch}
        most_rows, length = self._shape
        num_rows = most_rows
        if may_be_short:
            num_rows = min(arrays["tokens"].size // length, most_rows)
        lacking = most_rows - num_rows
        for name, array in arrays.items():
            if array.shape != (num_rows, length):
                raise UserError(
                    f"{self._corpus} gives {name} of shape {array.shape}, not {self._shape}"
                )
            arrays[name] = np.pad(array, ((0, lacking), (0, 0)))
        targets = arrays["targets"]
        targets[num_rows:] = IGNORED
        targets[targets < 0] = IGNORED
        if "mask" in arrays:
            targets[arrays.pop("mask") == 0] = IGNORED
        if np.all(targets == IGNORED):
            raise UserError(f"{self._corpus} gives a batch with nothing to predict")
        return arrays

    def _enter_array(self, name: str, values: object) -> np.ndarray:
        """Returns int32 of the same numbers, which are whole and in the range of the name."""
        lowest, highest = self._ranges[name]
        array = np.asarray(values)
        # A masked array would lose its mask.
        is_right = array.dtype.kind in "biuf" and not np.ma.is_masked(values)
        if is_right:
            in_range = (lowest <= array) & (array <= highest)  # as NaN is not
            if name == "targets":
                in_range |= array == -100  # which PyTorch leaves out
            is_right = bool(in_range.all())
        if not is_right or np.any(array % 1):
            raise UserError(
                f"{self._corpus} gives {name} whose values are not all whole numbers of "
                f"{lowest} to {highest}"
            )
        return array.astype(np.int32)
