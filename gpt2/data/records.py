"""Token streams on disk: written once as a TFDS data set, read at any position.

A split is one stream of tokens, cut into records of `RECORD_TOKENS`. A record is longer than most
training windows, so that most windows touch one record. It is much shorter than the cache, so that
a random read decodes little that it does not need.

TFDS and Grain are imported where they are used: that takes most of a second, and a mistake in an
option is told before.
"""

import contextlib
import functools
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

RECORD_TOKENS = 4096
SHARD_RECORDS = 4096  # 16 Mi tokens to a file: reading a record takes longer in a longer file
FLUSH_RECORDS = 1024  # records that wait in memory before they are written
CACHE_RECORDS = 8192  # decoded records kept by a reader: at most 128 MiB

NAME = "tokens"
VERSION = "1.0.0"


class TokenStream(Protocol):
    """A split's tokens, `len(stream)` of them."""

    def __len__(self) -> int: ...

    def read(self, start: int, length: int) -> np.ndarray:
        """Returns tokens [start, start + length), int32; fewer where the stream ends."""


class RecordWriter:
    """Appends to the two splits of a TFDS data set in ArrayRecord files.

    Args:
        directory: an existing empty directory.
        vocab_size: decides the type of a stored token: uint16 where it fits, else uint32.

    Attributes:
        crc32: of each split's tokens so far, as they are stored.
    """

    def __init__(self, directory: Path, vocab_size: int):
        import tensorflow_datasets as tfds
        from tensorflow_datasets.core import dataset_info, sequential_writer

        self._dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
        identity = dataset_info.DatasetIdentity(
            name=NAME,
            version=tfds.core.Version(VERSION),
            data_dir=str(directory),
            module_name=__name__,
        )
        tokens = tfds.features.Tensor(shape=(None,), dtype=self._dtype, encoding="bytes")
        info = tfds.core.DatasetInfo(
            builder=identity,
            description="Fixed-length blocks of one token stream per split.",
            features=tfds.features.FeaturesDict({"tokens": tokens}),
        )
        self._writer = sequential_writer.SequentialWriter(
            info, max_examples_per_shard=SHARD_RECORDS, file_format="array_record"
        )
        self._waiting: dict[str, list[np.ndarray]] = {"train": [], "validation": []}
        self._num_waiting = dict.fromkeys(self._waiting, 0)
        self.crc32 = dict.fromkeys(self._waiting, 0)
        self._writer.initialize_splits(list(self._waiting))

    def append(self, split: str, tokens: np.ndarray) -> None:
        """Appends token ids [num_tokens] to a split's stream."""
        stored = tokens.astype(self._dtype)
        self.crc32[split] = zlib.crc32(stored.tobytes(), self.crc32[split])
        self._waiting[split].append(stored)
        self._num_waiting[split] += len(tokens)
        if self._num_waiting[split] >= FLUSH_RECORDS * RECORD_TOKENS:
            self._flush(split, RECORD_TOKENS)

    def close(self) -> None:
        """Writes what is left and the data set's description."""
        for split in self._waiting:
            self._flush(split, 1)
        with _writing():
            self._writer.close_all()

    def _flush(self, split: str, least: int) -> None:
        """Writes the waiting tokens as records of at least `least` tokens."""
        stream = np.concatenate([*self._waiting[split], np.empty(0, self._dtype)])
        records = [stream[i : i + RECORD_TOKENS] for i in range(0, len(stream), RECORD_TOKENS)]
        left = records.pop() if records and len(records[-1]) < least else stream[:0]
        with _writing():
            self._writer.add_examples({split: [{"tokens": record} for record in records]})
        self._waiting[split] = [left]
        self._num_waiting[split] = len(left)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Turns what array_record raises where it cannot write, on a full disk too, into an OSError."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(str(error).partition(";")[0]) from error


class RecordStream:
    """A split that `RecordWriter` wrote, read by Grain from the TFDS data source."""

    def __init__(self, directory: Path, split: str, num_tokens: int):
        import grain
        import tensorflow_datasets as tfds

        self._num_tokens = num_tokens
        if num_tokens:  # TFDS opens no split without files
            source = tfds.builder_from_directory(directory).as_data_source(split=split)
            self._records = grain.MapDataset.source(source)
        self._record = functools.lru_cache(CACHE_RECORDS)(lambda i: self._records[i]["tokens"])

    def __len__(self) -> int:
        return self._num_tokens

    def read(self, start: int, length: int) -> np.ndarray:
        """Returns tokens [start, start + length), int32; fewer where the stream ends."""
        stop = min(start + length, self._num_tokens)
        out = np.empty(max(stop - start, 0), np.int32)
        position = start
        while position < stop:
            number, skip = divmod(position, RECORD_TOKENS)
            piece = self._record(number)[skip : skip + stop - position]
            out[position - start : position - start + len(piece)] = piece
            position += len(piece)
        return out
