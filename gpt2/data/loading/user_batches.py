"""Batches that a user's function returns, for `data.corpus=python:MODULE:FUNCTION`.

The function has a parameter `split`. A function without this parameter returns documents instead.
"""

import base64
import functools
import inspect
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpt2.config import Config, DataConfig
from gpt2.data import tokenizer as tokenizers
from gpt2.data.interfaces import (
    Batch,
    Corpus,
    Dataset,
    Parts,
    Source,
    WeightedBatches,
)
from gpt2.data.loading.token_batches import IGNORED
from gpt2.errors import UserError, warn
from gpt2.utils.files import reading

UserBatch = Mapping[str, Any]  # array-likes by name
MakeBatches = Callable[..., Iterable[UserBatch]]
# Number of states of the user's iterable that are retained, the newest ones. A checkpoint needs the
# state after its own step, but `prefetch` has then already read later batches. This number must
# exceed the number of these batches.
NUM_STATES = 16
INT32 = np.iinfo(np.int32)


@dataclass(frozen=True)
class BatchFunction(Corpus):
    """A user's function that returns an iterable of batches.

    The function has the parameter `split` (`train` or `validation`). If it needs the run's seed, it
    also has the parameter `seed`.
    """

    name: str  # python:MODULE:FUNCTION
    function: MakeBatches
    code: str  # hash of the module's code

    def prepare(self, data: DataConfig) -> "UserDataset":
        """Return the dataset of the function's batches. This does not call the function."""
        tokenizer = tokenizers.build(data.tokenizer, end_of_text=data.end_of_text)
        return UserDataset(tokenizer, self)


@dataclass(frozen=True)
class UserDataset(Dataset):
    """The batches of a user's function, and the tokenizer that produced their tokens."""

    tokenizer: tokenizers.Tokenizer
    made_by: BatchFunction
    parts: Parts = field(default_factory=dict)  # empty, because nothing is stored

    def describe(self) -> dict[str, object]:
        """Return the tokenizer's name, its hash and a hash of the function's module, for data.json.

        The data are not described, because only the user's function has access to them.
        """
        return {
            "code": self.made_by.code,
            "tokenizer": self.tokenizer.name,
            "tokenizer_sha256": tokenizers.fingerprint(self.tokenizer),
        }

    def open(self, config: Config) -> "UserBatches":
        """Return the batches of a run. Raise a UserError for options that would have no effect."""
        options = {
            "train.batch_schedule": config.train.batch_schedule,
            "train.context_schedule": config.train.context_schedule,
            "data.document_mask": config.data.document_mask,
            "data.packing": config.data.packing != "concat",
            "data.shuffle_documents": config.data.shuffle_documents,
            "data.unique": config.data.unique,
        }
        given = [name for name, is_given in options.items() if is_given]
        if given:
            raise UserError(
                f"{self.made_by.name} returns finished batches, which {' and '.join(given)} "
                "cannot change",
                "Leave out these options. To mask documents, return `segments` in each batch",
            )
        return UserBatches(self.made_by.name, self.made_by.function, config)


class UserBatches(Source):
    """The batches of a user's function, in order. When they end, the function is called again.

    Positions are stored and restored with the methods of Grain's iterators (`get_state` and
    `set_state`) or of torchdata's iterables (`state_dict` and `load_state_dict`).
    """

    def __init__(self, name: str, function: MakeBatches, config: Config):
        self._name = name
        if "seed" in inspect.signature(function).parameters:
            function = functools.partial(function, seed=config.seed)
        self._function = function
        self._context_length = config.model.context_length
        self._train_options = config.train
        largest = config.model.vocab_size - 1
        # The smallest and the largest value of each array that the model or the loss interprets.
        self._ranges = {
            "tokens": (0, largest),
            "targets": (IGNORED, largest),
            "mask": (0, 1),
            "segments": (0, INT32.max),
        }
        self._required = {"tokens", "targets"}
        self._batches: Iterator[UserBatch] | None = None
        self._get_state: Callable[[], object] | None = None
        self._states = dict[int, str]()  # step -> the state after this step
        self._restored = ""

    def position(self, step: int) -> str:
        """Return the iterator's state after a step as a string, empty if no state was saved."""
        return self._states.get(step, "")

    def restore(self, position: str) -> None:
        """Continue from a state that `position` returned."""
        self._restored = position

    def describe(self, num_steps: int) -> str:
        """Return a description that names the function."""
        return f"batches of {self._name}"

    def batch(self, step: int, rows: slice) -> Batch:
        """Return the rows of a step's batch that this process reads.

        Call this method once for each step, in order. The user's function returns only the rows of
        its own process, so only the number of `rows` matters.
        """
        if self._batches is None:
            if step > 1 and not self._restored:
                warn(
                    f"{self._name} saves no state, so step {step} starts again at the "
                    "function's first batch. To continue where the run stopped, return an "
                    "iterable whose state can be saved (docs/data.md)"
                )
            self._batches = self._repeat()
        batch = next(self._batches)
        if self._get_state:
            pickled = pickle.dumps(self._get_state())
            self._states[step] = base64.b64encode(pickled).decode()
            self._states.pop(step - NUM_STATES, None)
        # As in PyTorch, the last batch of an epoch may have fewer rows. Any batch after the first
        # step may be the last of an epoch, but at the first step, fewer rows are a mistake.
        return self._convert(batch, rows.stop - rows.start, may_be_short=step > 1)

    def validation(
        self, rows: slice, num_batches: int = 0
    ) -> tuple[dict[str, WeightedBatches], None]:
        """Return the validation batches, cut into micro-batches of the size of `rows`.

        See `Source.validation`. The corpus has an empty name, and `targets_per_byte` is None.
        """
        limit = num_batches or self._train_options.eval_batches
        batches = itertools.islice(self._read("validation"), limit or None)
        return {"": (1.0, self._cut(batches, rows.stop - rows.start))}, None

    def _cut(self, batches: Iterable[UserBatch], num_rows: int) -> Iterator[Batch]:
        """Yield the micro-batches of each batch, of `num_rows` rows each.

        A micro-batch may have no target, but each batch of the user has at least one.
        """
        total = num_rows * self._train_options.accumulate_steps
        for batch in batches:
            arrays = self._convert(batch, total, may_be_short=True)
            for start in range(0, total, num_rows):
                part = slice(start, start + num_rows)
                yield {name: array[part] for name, array in arrays.items()}

    def _repeat(self) -> Iterator[UserBatch]:
        """Yield training batches forever: when the function's batches end, call it again.

        The first call continues from the restored state, if there is one.
        """
        yield from self._read("train", self._restored)
        while True:
            yield from self._read("train")

    def _read(self, split: str, state: str = "") -> Iterator[UserBatch]:
        """Call the user's function, and yield its batches for `split`.

        Continue from `state`, a value that `position` returned, unless it is empty.
        """
        iterable: Any = self._function(split=split)
        saved = pickle.loads(base64.b64decode(state)) if state else None
        loads_state = hasattr(iterable, "load_state_dict")
        if state and loads_state:
            iterable.load_state_dict(saved)
        try:
            iterator: Any = iter(iterable)
        except TypeError:
            raise self._no_batches() from None
        if state and hasattr(iterator, "set_state"):
            iterator.set_state(saved)
        elif state and not loads_state:
            warn(
                f"the iterable of {self._name} no longer has a method load_state_dict or set_state "
                "for the state in the checkpoint, so the run starts again at the function's first "
                "batch"
            )
        if split == "train":
            state_dict = getattr(iterable, "state_dict", None)
            self._get_state = getattr(iterator, "get_state", state_dict)
        is_empty = not state
        for batch in iterator:
            is_empty = False
            if not isinstance(batch, Mapping):
                raise self._no_batches()
            yield batch
        if is_empty:
            raise UserError(
                f"{self._name} returns no batches for split={split}",
                "Return at least one batch",
            )

    def _no_batches(self) -> UserError:
        return UserError(
            f"{self._name} does not return an iterable of dicts",
            "Yield one dict of arrays for each batch",
        )

    def _convert(self, batch: UserBatch, num_rows: int, *, may_be_short: bool) -> Batch:
        """Return a user's batch as arrays `[num_rows, T]`. Raise a UserError for a bad array.

        If `may_be_short`, the batch may have fewer rows. Rows without targets are then added.
        """
        if missing := self._required - batch.keys():
            raise UserError(
                f"{self._name} returns a batch without {', '.join(sorted(missing))}",
                "Give every batch arrays with the same names, including tokens and targets",
            )
        length = self._context_length
        given = min(len(batch["tokens"]), num_rows) if may_be_short else num_rows
        arrays = Batch()
        for name, values in batch.items():
            array = self._convert_array(name, values)
            if array.shape != (given, length):
                raise UserError(
                    f"{self._name} returns {name} of shape {array.shape}, not "
                    f"{(num_rows, length)}",
                    "Return arrays of the shape (rows of this process, model.context_length)",
                )
            arrays[name] = np.pad(array, ((0, num_rows - given), (0, 0)))
        targets = arrays["targets"]
        targets[given:] = IGNORED
        targets[targets < 0] = IGNORED
        if "mask" in arrays:
            targets[arrays.pop("mask") == 0] = IGNORED
        self._required |= batch.keys()
        if np.all(targets == IGNORED):
            raise UserError(
                f"{self._name} returns a batch whose targets and mask leave nothing to predict",
                "Leave out batches without targets",
            )
        return arrays

    def _convert_array(self, name: str, values: object) -> np.ndarray:
        """Return `values` as int32, or as float32 if they are floats and `name` is user-defined.

        Raise a UserError if a value is outside the range that the array `name` may have.
        """
        remedy = "Return arrays of numbers"
        failed = "is not an array of numbers"
        with (
            reading(f"{self._name}: {name}", remedy, failed),
            np.errstate(over="ignore"),
        ):
            array = np.asarray(values)
            is_floating = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
            is_float = is_floating and name not in self._ranges
            if is_float:
                array = array.astype(np.float32)
                allowed = "finite numbers"
                is_right = np.isfinite(array)
            else:
                lowest, highest = self._ranges.get(name, (INT32.min, INT32.max))
                allowed = f"whole numbers from {lowest} to {highest}"
                is_right = (lowest <= array) & (array <= highest) & (array % 1 == 0)
        if name == "targets":
            is_right |= array == -100  # PyTorch's index of ignored targets
        # np.asarray drops the mask of a masked array.
        if np.ma.is_masked(values) or not is_right.all():
            raise UserError(
                f"{self._name} returns {name} of {array.dtype} with values that are not "
                f"{allowed}, or that are masked with numpy.ma",
                f"Return a plain NumPy array of {allowed}",
            )
        return array.astype(np.float32 if is_float else np.int32)
