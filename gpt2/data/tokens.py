"""Tokens on disk: flat files of uint16 or uint32, read at any position through memory maps."""

import bisect
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from gpt2.utils.files import reading

CHUNK = 2**20  # tokens read at a time


class Shard(NamedTuple):
    """A stretch of tokens in a file."""

    file: str
    skip: int  # tokens that come before
    num_tokens: int


@dataclass
class Split:
    """What a split holds, and where."""

    num_tokens: int = 0  # end-of-text tokens included
    num_bytes: int = 0  # UTF-8 bytes of the documents; end-of-text tokens count none
    num_documents: int = 0  # the two halves of a single text count as one each
    num_lost: int = 0  # bytes that the tokens do not give back
    crc32: int = 0  # of the tokens, as stored
    shards: list[Shard] = field(
        default_factory=list
    )  # read from JSON: lists of the same


class TokenWriter:
    """Appends token ids to the splits of a prepared corpus, to new files after each `close`."""

    def __init__(self, directory: Path, vocab_size: int, splits: dict[str, Split]):
        self.dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
        self._directory = directory
        self._splits = splits
        self._files = dict[str, IO[bytes]]()  # of each split, its last

    def append(self, name: str, tokens: np.ndarray) -> None:
        """Appends token ids [num_tokens] to a split."""
        if not len(tokens):
            return
        split = self._splits[name]
        if name not in self._files:
            shard = Shard(f"{name}-{len(split.shards):05}.bin", 0, 0)
            split.shards.append(shard)
            # A kill may have left one of the same name, which is not counted.
            self._files[name] = (self._directory / shard.file).open("wb")
        stored = tokens.astype(self.dtype).tobytes()
        self._files[name].write(stored)
        shard = split.shards[-1]
        split.shards[-1] = shard._replace(num_tokens=shard.num_tokens + len(tokens))
        split.num_tokens += len(tokens)
        split.crc32 = zlib.crc32(stored, split.crc32)

    def close(self) -> None:
        """Ends the files that are open."""
        for file in self._files.values():
            file.close()
        self._files.clear()


class TokenStream:
    """One split's shards as a single stream of `len(stream)` tokens."""

    def __init__(self, shards: Iterable[Shard], dtype: str, directory: Path = Path()):
        self._shards = list[np.ndarray]()
        self._ends = list[int]()
        end = 0
        for file, skip, num_tokens in shards:
            path = directory / file
            offset = skip * np.dtype(dtype).itemsize
            with reading(path):
                mapped = np.memmap(path, dtype, "r", offset, shape=(num_tokens,))
            self._shards.append(mapped.view(np.ndarray))  # of which slices are cheap
            end += num_tokens
            self._ends.append(end)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, length: int) -> np.ndarray:
        """Returns tokens [start, start + length), int32; fewer where the stream ends."""
        stop = min(start + length, len(self))
        parts = [np.empty(0, np.int32)]
        while start < stop:
            number = bisect.bisect_right(self._ends, start)
            shard = self._shards[number]
            end = self._ends[number]
            first = len(shard) - (end - start)
            parts.append(shard[first : first + stop - start])
            start = end
        return np.concatenate(parts, dtype=np.int32)

    def chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields all tokens, int32, so many at a time, and where in the stream they begin."""
        for start in range(0, len(self), CHUNK):
            yield start, self.read(start, CHUNK)
