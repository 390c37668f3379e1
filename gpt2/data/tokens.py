"""Tokens on disk: flat files of uint16 or uint32, read at any position through memory maps."""

import bisect
import functools
import itertools
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpt2.data import tokenizer as tokenizers
from gpt2.utils.files import reading

CHUNK = 2**20  # tokens read at a time
# Each map needs a file descriptor, and a process may have only 256 (macOS) or 1,024 (Linux).
OPEN_MAPS = 200


class Shard(NamedTuple):
    """A file of token ids, or a range of the tokens in such a file."""

    file: str
    skip: int  # tokens before the range
    num_tokens: int


@dataclass
class Split:
    """A training or validation split of a prepared corpus: its sizes, and where its tokens are."""

    num_tokens: int = 0  # including end-of-text tokens
    num_bytes: int = 0  # UTF-8 bytes of the documents; an end-of-text token has none
    num_documents: int = 0  # a single text counts as one document in each split
    num_lost: int = 0  # bytes of the documents that the tokens do not preserve
    crc32: int = 0  # CRC-32 of the tokens as stored
    # After a split is read from JSON, each shard is a list of its three values.
    shards: list[Shard] = field(default_factory=list)


class TokenWriter:
    """A writer of the tokens of all `splits` to files in `directory`.

    `append` collects tokens in memory, and each `flush` writes them to new files. Both update the
    counts in `splits`. Tokens are stored as uint16 if the vocabulary has at most 2^16 tokens, and
    otherwise as uint32.
    """

    def __init__(self, directory: Path, vocab_size: int, splits: dict[str, Split]):
        self.dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
        self._directory = directory
        self._splits = splits
        self._unwritten: dict[str, list[np.ndarray]] = {name: [] for name in splits}

    def append(self, name: str, tokens: np.ndarray) -> None:
        """Append token ids [num_tokens] to the split `name`. They are written by `flush`."""
        self._unwritten[name].append(tokens.astype(self.dtype))
        self._splits[name].num_tokens += len(tokens)

    def flush(self) -> list[str]:
        """Write the collected tokens, one new file for each split that has grown.

        Return the names of these files.
        """
        written = list[str]()
        for name, split in self._splits.items():
            stored = b"".join(self._unwritten[name])
            self._unwritten[name].clear()
            if stored:
                file = f"{name}-{len(split.shards):05}.bin"
                (self._directory / file).write_bytes(stored)
                num_tokens = len(stored) // self.dtype.itemsize
                split.shards.append(Shard(file, 0, num_tokens))
                split.crc32 = zlib.crc32(stored, split.crc32)
                written.append(file)
        return written


@functools.lru_cache(OPEN_MAPS)
def map_shard(path: str, skip: int, num_tokens: int, dtype: str) -> np.ndarray:
    """Return a read-only memory map of the tokens of a shard, `[num_tokens]`.

    The file `path` has `skip` tokens of `dtype` before the shard.
    """
    remedy = (
        "Restore the file from a copy. If it belongs to a prepared corpus, you can instead remove"
        " the folder of this corpus, and repeat the command"
    )
    with reading(path, remedy):
        offset = skip * np.dtype(dtype).itemsize
        mapped = np.memmap(path, dtype, "r", offset, shape=(num_tokens,))
    return mapped.view(np.ndarray)  # slices of an np.memmap are slow


class TokenStream:
    """The shards of a split as one stream of `len(stream)` tokens."""

    def __init__(self, shards: Iterable[Shard], dtype: str, directory: Path = Path()):
        self._dtype = dtype
        self._shards = list[Shard]()
        for file, skip, num_tokens in shards:
            self._shards.append(Shard(str(directory / file), skip, num_tokens))
        sizes = (shard.num_tokens for shard in self._shards)
        self._ends = list(itertools.accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, length: int) -> np.ndarray:
        """Return `length` tokens from the index `start` on, int32 `[length]`.

        At the end of the stream, return fewer.
        """
        stop = min(start + length, len(self))
        parts = [np.empty(0, np.int32)]
        while start < stop:
            number = bisect.bisect_right(self._ends, start)
            tokens = map_shard(*self._shards[number], self._dtype)
            end = self._ends[number]
            first = len(tokens) - (end - start)
            parts.append(tokens[first : first + stop - start])
            start = end
        return np.concatenate(parts, dtype=np.int32)

    def chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield `(start, tokens)` for one chunk of the stream after another.

        `tokens` are up to `CHUNK` tokens, int32, and `start` is the index of the first of them.
        """
        for start in range(0, len(self), CHUNK):
            yield start, self.read(start, CHUNK)


@dataclass(frozen=True)
class PreparedTokens:
    """The tokens of one corpus on disk, and the tokenizer that made them."""

    directory: Path
    tokenizer: tokenizers.Tokenizer
    splits: dict[str, Split]  # `train` and `validation`
    dtype: str  # dtype of the stored tokens
    # Further facts about the text: `revision`, its commit on the hub, and `num_skipped`, the number
    # of documents without text. A fact that does not apply is left out.
    details: dict[str, str | int] = field(default_factory=dict)

    def stream(self, split: str) -> TokenStream:
        """Return the tokens of a split, `train` or `validation`."""
        return TokenStream(self.splits[split].shards, self.dtype, self.directory)

    @property
    def bytes_per_target(self) -> float | None:
        """Bytes of validation text per target, or None if the tokens do not preserve the text.

        The number of targets is one less than the number of tokens, because the first token is not
        a target.
        """
        validation = self.splits["validation"]
        if validation.num_lost:
            return None
        return validation.num_bytes / (validation.num_tokens - 1)

    def describe(self) -> dict[str, object]:
        """Return a description of the tokens for a run's data.json.

        It does not contain their location, so it stays the same if files are moved.
        """
        counts = dict[str, dict[str, int]]()
        crc32 = dict[str, int]()
        for name, split in self.splits.items():
            counts[name] = asdict(split)
            del counts[name]["shards"]
            crc32[name] = counts[name].pop("crc32")
        return {
            "tokenizer": self.tokenizer.name,
            "tokenizer_sha256": tokenizers.fingerprint(self.tokenizer),
            "splits": counts,
            "token_crc32": crc32,
            **self.details,
        }
