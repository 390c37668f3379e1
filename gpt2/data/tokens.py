"""Tokens on disk: flat files of uint16 or uint32, read at any position through memory maps.

Prepared text and ready shards are read alike: nanoGPT's bare .bin, llm.c's and modded-nanogpt's
with a header, build-nanogpt's .npy.
"""

import mmap
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from gpt2.config import DataConfig
from gpt2.data.corpus import file_fingerprint, find_files, reading
from gpt2.data.tokenizer import build, is_path
from gpt2.errors import UserError
from gpt2.utils.stores import at_hand, find, is_url

SHARD_TOKENS = 2**26  # in a file
HEADER = 256  # int32 numbers, llm.c dev/data/data_common.py
FORMATS = {
    (20240520, 1): "uint16",
    (20240801, 7): "uint32",
}  # magic, version: GPT-2's, Llama 3's
VALIDATION = re.compile(r"(?<![a-z])val(idation)?(?![a-z])", re.IGNORECASE)
CHUNK = 2**20  # tokens read at a time
LENGTHS = (64, 256, 1024, 4096, 16384)  # tokens, up to which documents are counted

Shard = tuple[str, int, int]  # file, tokens to skip in it, tokens


class TokenWriter:
    """Appends token ids to the splits of a prepared corpus."""

    def __init__(self, directory: Path, vocab_size: int):
        self.dtype = np.dtype(
            np.uint16 if vocab_size <= 2**16 else np.uint32
        )  # as stored
        # of each split, its last
        self._directory = directory
        self._files = dict[str, IO[bytes]]()
        self.crc32 = {"train": 0, "validation": 0}  # of the tokens so far, as stored
        self.shards: dict[str, list[Shard]] = {"train": [], "validation": []}

    def append(self, split: str, tokens: np.ndarray) -> None:
        """Appends token ids [num_tokens] to a split."""
        stored = tokens.astype(self.dtype).tobytes()
        shards = self.shards[split]
        if not stored:
            return
        self.crc32[split] = zlib.crc32(stored, self.crc32[split])
        if not shards or shards[-1][2] >= SHARD_TOKENS:
            shards.append((f"{split}-{len(shards):05}.bin", 0, 0))
        name, _, count = shards[-1]
        if not count or split not in self._files:
            self._files[split] = (self._directory / name).open(
                "ab" if count else "wb", 0
            )
        rest = memoryview(stored)
        while rest:  # a disk that is full takes a part
            rest = rest[self._files[split].write(rest) :]
        shards[-1] = name, 0, count + len(tokens)


class TokenStream:
    """One split's shards as a single stream of `len(stream)` tokens."""

    def __init__(self, shards: Iterable[Shard], dtype: str, directory: Path = Path()):
        kind = np.dtype(dtype)
        views = list[np.ndarray]()
        maps = list[Any]()
        for name, skip, count in shards:
            path = directory / name
            with reading(path):
                offset = kind.itemsize * skip
                mapped = np.memmap(path, kind, "r", offset, shape=(count,))
                views.append(mapped.view(np.ndarray))  # of which slices are cheap
                maps.append(mapped.base)
        self._maps = maps
        self._shards = (
            views,
            np.cumsum([len(shard) for shard in views]),
        )  # at once: it may grow

    def __len__(self) -> int:
        _, ends = self._shards
        return int(ends[-1]) if len(ends) else 0

    def wait(self, num_tokens: float) -> int:
        """Waits until so many tokens, or all, are prepared; returns how many are."""
        return len(self)

    def read(self, start: int, length: int) -> np.ndarray:
        """Returns tokens [start, start + length), int32; fewer where the stream ends."""
        stop = min(start + length, self.wait(start + length))
        (shards, ends), parts = self._shards, [np.empty(0, np.int32)]
        while start < stop:
            number = int(np.searchsorted(ends, start, side="right"))
            shard = shards[number]
            end = int(ends[number])
            first = len(shard) - (end - start)
            parts.append(shard[first : first + stop - start])
            start = end
        return np.concatenate(parts, dtype=np.int32)

    def crc32(self, length: int) -> int:
        """Returns the CRC-32 of the first tokens, as int32."""
        crc = 0
        for start in range(0, length, CHUNK):
            crc = zlib.crc32(
                self.read(start, min(CHUNK, length - start)).tobytes(), crc
            )
        return crc

    def count_documents(self, eot: int | None) -> dict[str, int]:
        """Returns how many documents have so many tokens, their end-of-text token included."""
        names = [
            *(f"documents of up to {n:,} tokens" for n in LENGTHS),
            "longer documents",
        ]
        counts = np.zeros(len(names), np.int64)
        last = 0
        for start in range(0, len(self) + 1, CHUNK):
            tokens = self.read(start, CHUNK)
            is_end = np.append(tokens == eot, start + len(tokens) == len(self))
            ends = start + np.flatnonzero(is_end)
            sizes = np.diff(ends, prepend=last)
            last = ends.max(initial=last)
            counts += np.bincount(
                np.searchsorted(LENGTHS, sizes[sizes > 0]), None, len(names)
            )
            for each in self._maps:  # what is mapped and was read counts as memory
                each.madvise(mmap.MADV_DONTNEED)
        return dict(zip(names, counts.tolist(), strict=True))


@dataclass(frozen=True)
class ReadyTokens:
    """Shards that somebody else has made."""

    fingerprint: str  # differs whenever the tokens may differ
    shards: dict[str, list[Shard]]  # of each split
    dtype: str  # of stored tokens


def open_ready_tokens(data: DataConfig) -> ReadyTokens:
    """Finds the shards of a `tokens:GLOB` corpus.

    Files with the word `val` or `validation` in their name are the validation split. If there are
    no such files, or no others, it is the last `val_fraction` of all tokens.
    """
    if data.unique:
        raise UserError(
            "data.unique drops documents of text, and data.corpus holds tokens"
        )
    found = find_files(data.corpus.removeprefix("tokens:"))
    files = [at_hand(file).absolute() for file in found]
    for place in {str(file).rpartition("/")[0] for file in (*found, *files)}:
        # nanoGPT's, beside ids of characters
        meta = f"{place}/meta.pkl"
        how = f"Use text:{place}/input.txt and --config.data.tokenizer=char"
        exists = find(meta) if is_url(meta) else Path(meta).exists()
        if exists:
            raise UserError(
                f"{meta} gives the tokens of {data.corpus} another meaning", how
            )
    is_other = data.tokenizer != "gpt2" and not is_path(data.tokenizer)
    what = f"data.corpus={data.corpus!r} holds GPT-2 tokens and data.tokenizer={data.tokenizer!r}"
    how = "Add --config.data.tokenizer=gpt2, or the tokenizer.json that they were made with"
    if is_other:
        raise UserError(what, how)
    shards = {p: _open_shard(p) for p in files}
    dtypes = {dtype for _, dtype in shards.values()}
    if len(dtypes) > 1:
        raise UserError(
            f"{data.corpus} matches tokens of 16 and of 32 bits", "Give one kind"
        )
    validation = [shards[p][0] for p in files if VALIDATION.search(p.name)]
    train = [shards[p][0] for p in files if not VALIDATION.search(p.name)]
    if not (train and validation):
        everything = [*train, *validation]
        num_train = int(
            sum(count for _, _, count in everything) * (1 - data.val_fraction)
        )
        train, validation = _cut(everything, num_train)
    splits = dict(train=train, validation=validation)
    return ReadyTokens(
        file_fingerprint(found, "tokens", *map(str, files)), splits, dtypes.pop()
    )


def index(ready: ReadyTokens, data: DataConfig, directory: Path) -> dict:
    """Writes the tokenizer and returns what `prepared.json` tells of ready tokens.

    It reads every token once, to count documents and bytes.
    """
    tokenizer = build(data.tokenizer, end_of_text=data.end_of_text)
    tokenizer.save(directory / "tokenizer.json")
    token_bytes = np.array(
        [len(tokenizer.decode_bytes([i])) for i in range(tokenizer.vocab_size)]
    )
    if tokenizer.eot is not None:
        token_bytes[tokenizer.eot] = 0
    splits = {}
    crc32 = dict.fromkeys(ready.shards, 0)
    for name, shards in ready.shards.items():
        stream = TokenStream(shards, ready.dtype)
        is_empty = name in data.splits and len(stream) < 2
        what = f"the {name} split of data.corpus has no token to predict"
        if is_empty:
            raise UserError(what, "Choose another --config.data.val_fraction")
        num_bytes = num_documents = 0
        for start in range(0, len(stream), CHUNK):
            tokens = stream.read(start, CHUNK)
            stored = tokens.astype(ready.dtype)
            what = f"the {name} shards hold token {stored.max()}, which {tokenizer.name} lacks"
            how = "Give the --config.data.tokenizer that they were made with"
            if stored.max() >= tokenizer.vocab_size:
                raise UserError(what, how)
            crc32[name] = zlib.crc32(stored.tobytes(), crc32[name])
            num_documents += int((tokens == tokenizer.eot).sum())
            if name == "validation":
                num_bytes += len(
                    tokenizer.decode_bytes(tokens[tokens != tokenizer.eot])
                )
            else:
                num_bytes += int(token_bytes[tokens].sum())
        splits[name] = dict(
            num_tokens=len(stream),
            num_bytes=num_bytes,
            num_documents=max(num_documents, 1),
        )
    return {
        "splits": splits,
        "token_crc32": crc32,
        "shards": ready.shards,
        "dtype": ready.dtype,
    }


def _open_shard(file: Path) -> tuple[Shard, str]:
    """Finds the tokens in a file, and their type."""
    try:
        with reading(file), open(file, "rb") as stream:
            size = file.stat().st_size
            start = stream.read(4 * HEADER).ljust(4 * HEADER, b"\xff")
            is_array = start.startswith(b"\x93NUMPY")
            array = np.lib.format.open_memmap(file, mode="r") if is_array else None
    except ValueError as error:
        raise UserError(
            f"{file} is no array of tokens ({error})", "Leave it out"
        ) from error
    magic, version, count = map(int, np.frombuffer(start, np.int32)[:3])
    high_halves = np.frombuffer(start, np.uint16)[1::2]  # if tokens have 32 bits
    dtype = "uint32" if high_halves.max() < 4 else "uint16"
    offset = 0
    if array is not None:
        wrong = array.dtype not in (np.uint16, np.uint32)
        if wrong:
            raise UserError(
                f"{file} holds {array.dtype}, not uint16 or uint32", "Leave it out"
            )
        dtype = array.dtype.name
        offset = array.offset
        count = array.size
    elif magic // 10_000 == 2024:  # llm.c dates the formats of its files
        dtype = FORMATS.get((magic, version), dtype)
        offset = 4 * HEADER
        present = (size - offset) // np.dtype(dtype).itemsize
        wrong = (magic, version) not in FORMATS or not 0 <= count <= present
        what = f"{file} has {present} tokens, and its header says version {version} and {count}"
        if wrong:
            raise UserError(
                f"{what} tokens", "Download it again, or leave it out of tokens:GLOB"
            )
    else:
        count = size // np.dtype(dtype).itemsize
    itemsize = np.dtype(dtype).itemsize
    if count == 0 or size % itemsize:
        raise UserError(
            f"{file} is not a shard of {dtype} tokens", "Leave it out of tokens:GLOB"
        )
    return (str(file), offset // itemsize, count), dtype


def _cut(shards: list[Shard], num_first: int) -> tuple[list[Shard], list[Shard]]:
    """Divides shards after `num_first` tokens."""
    first = []
    second = []
    for path, skip, count in shards:
        head = min(max(num_first, 0), count)
        num_first -= count
        if head:
            first.append((path, skip, head))
        if count > head:
            second.append((path, skip + head, count - head))
    return first, second
