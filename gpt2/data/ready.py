"""Tokens that others have made, read in place.

nanoGPT writes bare .bin files, llm.c and modded-nanogpt some with a header, build-nanogpt .npy.
"""

import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpt2.config import DataConfig
from gpt2.data.dataset import Dataset
from gpt2.data.foreign import find_files, fingerprint
from gpt2.data.tokenizer import build, is_path
from gpt2.data.tokens import Shard, Split, TokenStream
from gpt2.errors import UserError
from gpt2.utils.files import reading
from gpt2.utils.stores import at_hand

HEADER = 256  # int32 numbers, llm.c dev/data/data_common.py
# Magic number and version: those of GPT-2's and of Llama 3's tokens.
FORMATS = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
Shards = list[Shard]
VALIDATION = re.compile(r"(?<![a-z])val(idation)?(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True)
class ReadyTokens:
    """Shards that somebody else has made."""

    fingerprint: str  # differs whenever the tokens may differ
    shards: dict[str, Shards]  # of each split
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
    if data.tokenizer != "gpt2" and not is_path(data.tokenizer):
        raise UserError(
            f"data.corpus={data.corpus!r} holds GPT-2 tokens and "
            f"data.tokenizer={data.tokenizer!r}",
            "Add --config.data.tokenizer=gpt2, or the tokenizer.json that they were made with",
        )
    found = find_files(data.corpus.removeprefix("tokens:"))
    files = [at_hand(file).absolute() for file in found]
    train = Shards()
    validation = Shards()
    dtypes = set[str]()
    for file in files:
        meta = file.with_name("meta.pkl")
        if meta.exists():  # nanoGPT's, of tokens that are characters
            raise UserError(
                f"{meta} gives the tokens beside it another meaning",
                f"Use text:{file.parent}/input.txt and --config.data.tokenizer=char",
            )
        shard, dtype = _open_shard(file)
        dtypes.add(dtype)
        is_validation = VALIDATION.search(file.name)
        (validation if is_validation else train).append(shard)
    if len(dtypes) > 1:
        raise UserError(
            f"{data.corpus} matches tokens of 16 and of 32 bits", "Give one kind"
        )
    if not (train and validation):
        shards = train + validation
        num_tokens = sum(shard.num_tokens for shard in shards)
        train, validation = _cut(shards, int(num_tokens * (1 - data.val_fraction)))
    return ReadyTokens(
        fingerprint(found, "tokens", *map(str, files)),
        {"train": train, "validation": validation},
        dtypes.pop(),
    )


def index(ready: ReadyTokens, data: DataConfig, directory: Path) -> Dataset:
    """Writes the tokenizer of ready tokens, and counts their documents and bytes."""
    tokenizer = build(data.tokenizer, end_of_text=data.end_of_text)
    tokenizer.save(directory / "tokenizer.json")
    sizes = [len(tokenizer.decode_bytes([i])) for i in range(tokenizer.vocab_size)]
    token_bytes = np.array(sizes)
    splits = dict[str, Split]()
    for name, shards in ready.shards.items():
        stream = TokenStream(shards, ready.dtype)
        split = Split(num_tokens=len(stream), shards=shards)
        for _, tokens in stream.chunks():
            largest = int(tokens.view(np.uint32).max())
            if largest >= tokenizer.vocab_size:
                raise UserError(
                    f"the {name} shards hold token {largest}, which {tokenizer.name} lacks",
                    "Give the --config.data.tokenizer that they were made with",
                )
            text = tokens[tokens != tokenizer.eot]
            if name == "validation":  # exactly, also where tokens depend on neighbours
                split.num_bytes += len(tokenizer.decode_bytes(text))
            else:
                split.num_bytes += int(token_bytes[text].sum())
            split.num_documents += len(tokens) - len(text)
            stored = tokens.astype(ready.dtype)
            split.crc32 = zlib.crc32(stored.data, split.crc32)
        split.num_documents = max(split.num_documents, 1)
        splits[name] = split
    return Dataset(directory, tokenizer, splits, ready.dtype)


def _open_shard(file: Path) -> tuple[Shard, str]:
    """Finds the tokens in a file, and their type."""
    how = "Leave it out of tokens:GLOB, or download it again"
    with reading(file, how), open(file, "rb") as stream:
        start = stream.read(4 * HEADER)
        size = file.stat().st_size
        offset = 0
        if start.startswith(b"\x93NUMPY"):
            array = np.lib.format.open_memmap(file, mode="r")
            dtype = array.dtype.name
            offset = array.offset
            num_tokens = array.size
            is_right = array.flags.c_contiguous and array.dtype.isnative
        else:
            header = np.frombuffer(start.ljust(4 * HEADER, b"\0"), np.int32)
            magic, version, num_tokens = header[:3].tolist()
            is_right = True
            if magic // 10_000 == 2024:  # llm.c dates the formats of its files
                dtype = FORMATS.get((magic, version), "of an unknown format")
                offset = 4 * HEADER
            else:
                quarters = header.view(np.uint16).reshape(-1, 4)  # of 64 bits
                dtype = "uint16"
                if size % 4 == 0 and quarters[:, 1::2].max() < 4:
                    dtype = "uint32" if quarters[:, 2:].any() else "uint64"
                num_tokens = size // np.dtype(dtype).itemsize
                # A thousand bytes of tokens hold some that are small; text does not.
                is_right = file.suffix == ".bin" and min(start, default=0) < 9
    if dtype not in ("uint16", "uint32"):
        raise UserError(f"{file} holds {dtype}, not uint16 or uint32", how)
    itemsize = np.dtype(dtype).itemsize
    if not is_right or not num_tokens or offset + num_tokens * itemsize != size:
        raise UserError(f"{file} is no file of {dtype} tokens, or is cut", how)
    return Shard(str(file), offset // itemsize, num_tokens), dtype


def _cut(shards: Shards, num_first: int) -> tuple[Shards, Shards]:
    """Divides shards after `num_first` tokens."""
    first = Shards()
    second = Shards()
    for file, skip, num_tokens in shards:
        head = min(num_first, num_tokens)
        num_first -= head
        if head:
            first.append(Shard(file, skip, head))
        if head < num_tokens:
            second.append(Shard(file, skip + head, num_tokens - head))
    return first, second
