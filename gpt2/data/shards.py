"""Ready token shards, read in place: nanoGPT's bare uint16 .bin, and llm.c's with a header."""

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpt2.config import DataConfig
from gpt2.data.corpus import file_fingerprint, find_files, reading
from gpt2.data.tokenizer_names import build
from gpt2.errors import UserError

HEADER = 256  # int32 numbers, llm.c dev/data/data_common.py
MAGIC, VERSION = 20240520, 1
VALIDATION = re.compile(r"(?<![a-z])val(idation)?(?![a-z])", re.IGNORECASE)
CHUNK = 2**20  # tokens read at a time


@dataclass(frozen=True)
class Shards:
    """Where each split's tokens lie: per shard (path, tokens to skip in the file, tokens).

    Attributes:
        by_share: whether `val_fraction` divides them; if not, their names do.
    """

    fingerprint: str
    files: dict[str, list[tuple[str, int, int]]]
    by_share: bool


def open_shards(data: DataConfig) -> Shards:
    """Finds the shards of a `tokens:GLOB` corpus, of GPT-2 tokens.

    Files with the word `val` or `validation` in their name are the validation split. If there are
    no such files, or no others, it is the last `val_fraction` of all tokens.

    Raises:
        UserError: no file matches, a file is broken, or the tokenizer is not GPT-2's.
    """
    if data.tokenizer != "gpt2":
        raise UserError(
            f"data.corpus={data.corpus!r} holds GPT-2 tokens and data.tokenizer={data.tokenizer!r}",
            "Add --config.data.tokenizer=gpt2",
        )
    files = [p.absolute() for p in find_files(data.corpus.removeprefix("tokens:"))]
    shards = {p: _tokens_in(p) for p in files}
    validation = [shards[p] for p in files if VALIDATION.search(p.name)]
    train = [shards[p] for p in files if not VALIDATION.search(p.name)]
    by_share = not (train and validation)
    if by_share:
        everything = list(shards.values())
        num_train = int(sum(count for _, _, count in everything) * (1 - data.val_fraction))
        train, validation = _cut(everything, num_train)
    splits = {"train": train, "validation": validation}
    return Shards(file_fingerprint(files, "tokens"), splits, by_share)


def index(shards: Shards, directory: Path, required: Iterable[str]) -> dict:
    """Writes the tokenizer and returns what `prepared.json` tells of the shards.

    It reads every token once, to count documents and bytes.

    Raises:
        UserError: a token is not one of GPT-2's, or a required split has no token to predict.
    """
    for name in required:
        if sum(count for _, _, count in shards.files[name]) < 2:
            raise UserError(
                f"the {name} split of these shards has no token to predict",
                "Choose another val_fraction" if shards.by_share else "Add to its shards",
            )
    tokenizer = build("gpt2")
    tokenizer.save(directory / "tokenizer.json")
    token_bytes = np.array([len(tokenizer.decode_bytes([i])) for i in range(tokenizer.vocab_size)])
    token_bytes[tokenizer.eot] = 0
    compressor, num_compressed = zlib.compressobj(9), 0
    splits, crc32 = {}, dict.fromkeys(shards.files, 0)
    for name, files in shards.files.items():
        stream = ShardStream(files)
        num_bytes = num_documents = 0
        for start in range(0, len(stream), CHUNK):
            tokens = stream.read(start, CHUNK)
            if tokens.max() >= tokenizer.vocab_size:
                raise UserError(
                    f"The {name} shards hold the token {tokens.max()}, which GPT-2 lacks",
                    "Give shards of GPT-2 tokens, uint16, with llm.c's header or none",
                )
            crc32[name] = zlib.crc32(tokens.astype(np.uint16).tobytes(), crc32[name])
            num_bytes += int(token_bytes[tokens].sum())
            num_documents += int((tokens == tokenizer.eot).sum())
            if name == "validation":
                text = tokenizer.decode_bytes(tokens[tokens != tokenizer.eot])
                num_compressed += len(compressor.compress(text))
        splits[name] = dict(
            num_tokens=len(stream), num_bytes=num_bytes, num_documents=max(num_documents, 1)
        )
    num_compressed += len(compressor.flush())
    return {
        "splits": splits,
        "zlib_bits_per_byte": 8 * num_compressed / max(splits["validation"]["num_bytes"], 1),
        "token_crc32": crc32,
        "shard_files": shards.files,
    }


class ShardStream:
    """One split's shards as a single stream of tokens, memory-mapped."""

    def __init__(self, files: list[tuple[str, int, int]]):
        self._shards = []
        for path, skip, count in files:
            with reading(path):
                shard = np.memmap(path, np.uint16, "r", offset=2 * skip, shape=(count,))
            self._shards.append(shard)
        self._ends = np.cumsum([count for _, _, count in files])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, length: int) -> np.ndarray:
        """Returns tokens [start, start + length), int32; fewer where the stream ends."""
        stop = min(start + length, len(self))
        pieces: list[np.ndarray] = [np.empty(0, np.int32)]
        position = start
        while position < stop:
            number = int(np.searchsorted(self._ends, position, side="right"))
            left = int(self._ends[number]) - position
            end = len(self._shards[number]) - left + min(left, stop - position)
            pieces.append(self._shards[number][len(self._shards[number]) - left : end])
            position += min(left, stop - position)
        return np.concatenate(pieces, dtype=np.int32)


def _tokens_in(file: Path) -> tuple[str, int, int]:
    with reading(file):
        size = file.stat().st_size
        header = np.fromfile(file, np.int32, HEADER)
    if len(header) == HEADER and header[0] == MAGIC:
        skip, count = HEADER * 2, int(header[2])
        if header[1] != VERSION:
            raise UserError(
                f"{file} is in llm.c's format {header[1]}, and {VERSION} is read here",
                "Write the shard anew, or leave it out of tokens:GLOB",
            )
        if not 0 <= count <= size // 2 - skip:
            raise UserError(
                f"{file} has {size // 2 - skip:,} tokens, and its header says {count:,}",
                "Download it again, or leave it out of tokens:GLOB",
            )
    else:
        skip, count = 0, size // 2
    if count == 0 or size % 2:
        raise UserError(f"{file} is not a shard of uint16 tokens", "Leave it out of tokens:GLOB")
    return str(file), skip, count


def _cut(shards: list[tuple[str, int, int]], num_first: int) -> tuple[list, list]:
    """Divides shards after `num_first` tokens."""
    first, second = [], []
    for path, skip, count in shards:
        head = min(max(num_first, 0), count)
        num_first -= count
        if head:
            first.append((path, skip, head))
        if count > head:
            second.append((path, skip + head, count - head))
    return first, second
