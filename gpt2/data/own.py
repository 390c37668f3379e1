"""Batches of a user's own: what `python:MODULE:FUNCTION` gives if FUNCTION takes `split`."""

import base64
import inspect
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from gpt2.data.corpus import import_function
from gpt2.errors import UserError

NAMES = {"tokens", "targets", "mask", "segments"}
KEPT = 16  # states, which is more than batches are read ahead


def find_batches(corpus: str) -> Callable[[str], Iterable] | None:
    """Returns the user's function of a split that gives batches, if `data.corpus` names one."""
    prefix, _, argument = corpus.partition(":")
    function = import_function(argument) if prefix == "python" else None
    return (
        function
        if function and "split" in inspect.signature(function).parameters
        else None
    )


class OwnBatches:
    """The batches of a user's function, one after another; it is called again at their end.

    State is Grain's (`get_state` and `set_state` of the iterator) or torchdata's (`state_dict` and
    `load_state_dict` of the iterable). `state` is what continues after so many steps.
    """

    def __init__(
        self, corpus: str, make: Callable, shape: tuple[int, int], vocab_size: int
    ):
        self._corpus = corpus
        self._make = make
        self._shape = shape
        self._vocab_size = vocab_size
        self.lengths = [shape[1]]
        self._next: int | None = None  # step
        self._states = dict[int, str]()  # by the steps before them
        self.restored = ""  # a state, with which the first batch begins

    def epochs(self, step: int) -> dict[str, float]:
        """Returns how often each part has been seen: nobody knows."""
        return {}

    def state(self, step: int) -> str:
        """Returns the state after so many steps, empty where the iterable has none."""
        return self._states.get(step, "")

    def batch(self, step: int, rows: slice) -> dict[str, np.ndarray]:
        """Returns the next batch, which holds this process's rows. Steps come in order, once."""
        if self._next not in (None, step):
            raise UserError(f"{self._corpus} gives its batches only once")
        if self._next is None:
            self._begin(self.restored)
        if (batch := next(self._iterator, None)) is None:
            self._begin()
            batch = next(self._iterator, None)
        self._next = step + 1
        if self._get_state:
            pickled = pickle.dumps(self._get_state())
            self._states[step + 1] = base64.b64encode(pickled).decode()
            self._states.pop(step + 1 - KEPT, None)
        return self._check(batch)

    def validation(self, num_rows: int) -> Iterator[dict[str, np.ndarray]]:
        """Yields the batches held out, so many rows at a time."""
        for batch in map(self._check, self._make(split="validation")):
            for start in range(0, self._shape[0], num_rows):
                yield {
                    name: rows[start : start + num_rows] for name, rows in batch.items()
                }

    def _begin(self, text: str = "") -> None:
        source = self._make(split="train")
        state = pickle.loads(base64.b64decode(text)) if text else None
        if text and hasattr(source, "load_state_dict"):
            source.load_state_dict(state)
        self._iterator: Any = iter(source)
        if text and hasattr(self._iterator, "set_state"):
            self._iterator.set_state(state)
        self._get_state = getattr(
            self._iterator, "get_state", getattr(source, "state_dict", None)
        )

    def _check(self, batch: Any) -> dict[str, np.ndarray]:
        """Returns int32 arrays, with -1 for targets that the mask leaves out."""
        fine = isinstance(batch, Mapping) and {"tokens", "targets"} <= {*batch} <= NAMES
        if not fine:
            raise UserError(
                f"{self._corpus} has to give dicts of {', '.join(sorted(NAMES))}"
            )
        arrays = {name: np.asarray(batch[name]).astype(np.int32) for name in batch}
        for name, array in arrays.items():
            what = (
                f"{self._corpus} gives {name} of shape {array.shape}, not {self._shape}"
            )
            if array.shape != self._shape:
                raise UserError(what)
        tokens = arrays["tokens"]
        mask = arrays.pop("mask", True)
        arrays["targets"] = targets = np.where(mask, arrays["targets"], np.int32(-1))
        wrong = tokens.min() < 0 or max(tokens.max(), targets.max()) >= self._vocab_size
        if wrong:
            raise UserError(
                f"{self._corpus} gives tokens beyond the {self._vocab_size} of the model"
            )
        return arrays
