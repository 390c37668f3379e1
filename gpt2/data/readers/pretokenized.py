"""Tokens that another program has stored. Their files are read in place.

nanoGPT writes bare .bin files, llm.c and modded-nanogpt some with a header, build-nanogpt .npy.
"""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from gpt2.config import DataConfig
from gpt2.data.preparing.prepared_folder import StoredCorpus
from gpt2.data.source_files import SourceFiles, match_files
from gpt2.data.tokenizer import build, is_path
from gpt2.data.tokens import PreparedTokens, Shard, Split, TokenStream
from gpt2.errors import UserError
from gpt2.utils.files import reading
from gpt2.utils.stores import local_path

HEADER = 256  # int32 numbers, llm.c dev/data/data_common.py
# Magic number and version of GPT-2's and of Llama 3's tokens.
FORMATS = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
VALIDATION = re.compile(r"(?<![a-z])val(idation)?(?![a-z])", re.IGNORECASE)
Shards = list[Shard]


def _open_tokens(pattern: str) -> "TokenCorpus":
    remote = match_files(pattern)
    paths = [local_path(file).absolute() for file in remote]
    files = SourceFiles(partial(match_files, pattern), "tokens", *map(str, paths))
    return TokenCorpus(fingerprint=files.fingerprint, files=files, paths=paths)


@dataclass(frozen=True, kw_only=True)
class TokenCorpus(StoredCorpus):
    """Token files. Those with the word `val` or `validation` in their name are for validation.

    If there are no such files, or no others, the last `val_fraction` of all tokens is.
    """

    paths: Sequence[Path]  # on this machine

    def write(self, data: DataConfig, directory: Path) -> PreparedTokens:
        """Write the tokenizer, and count the documents and bytes of the tokens."""
        _check_options(data)
        shards, dtype = self._find_shards(data)
        tokenizer = build(data.tokenizer, end_of_text=data.end_of_text)
        tokenizer.save(directory / "tokenizer.json")
        sizes = [len(tokenizer.decode_bytes([i])) for i in range(tokenizer.vocab_size)]
        token_bytes = np.array(sizes)
        splits = dict[str, Split]()
        for name in shards:
            stream = TokenStream(shards[name], dtype)
            split = Split(num_tokens=len(stream), shards=shards[name])
            for _, tokens in stream.chunks():
                largest = int(tokens.view(np.uint32).max())
                if largest >= tokenizer.vocab_size:
                    raise UserError(
                        f"The {name} files of {data.corpus} hold token {largest}, and "
                        f"{tokenizer.name} has only {tokenizer.vocab_size} tokens",
                        "Give the --config.data.tokenizer that made the tokens",
                    )
                text = tokens[tokens != tokenizer.eot]
                if name == "validation":  # exact, even if tokens depend on neighbours
                    split.num_bytes += len(tokenizer.decode_bytes(text))
                else:
                    split.num_bytes += int(token_bytes[text].sum())
                split.num_documents += len(tokens) - len(text)
                stored = tokens.astype(dtype)
                split.crc32 = zlib.crc32(stored.data, split.crc32)
            split.num_documents = max(split.num_documents, 1)
            splits[name] = split
        return PreparedTokens(directory, tokenizer, splits, dtype)

    def _find_shards(self, data: DataConfig) -> tuple[dict[str, Shards], str]:
        """Return the shards of each split, and the dtype of their tokens."""
        train = Shards()
        validation = Shards()
        dtypes = set[str]()
        for path in self.paths:
            shard, dtype = _open_shard(path)
            dtypes.add(dtype)
            is_validation = VALIDATION.search(path.name)
            (validation if is_validation else train).append(shard)
        if len(dtypes) > 1:
            raise UserError(
                f"{data.corpus} matches files of uint16 and of uint32 tokens",
                "Name files of one dtype",
            )
        if not (train and validation):
            shards = train + validation
            num_tokens = sum(shard.num_tokens for shard in shards)
            num_train = int(num_tokens * (1 - data.val_fraction))
            train, validation = _cut(shards, num_train)
        return {"train": train, "validation": validation}, dtypes.pop()


def _check_options(data: DataConfig) -> None:
    if data.unique:
        raise UserError(
            f"data.unique=True drops documents of text, and data.corpus={data.corpus} holds tokens",
            "Leave data.unique out",
        )
    if data.tokenizer != "gpt2" and not is_path(data.tokenizer):
        raise UserError(
            f"data.corpus={data.corpus} cannot hold tokens of data.tokenizer={data.tokenizer}",
            "Add --config.data.tokenizer=gpt2, or the tokenizer.json that made the tokens",
        )


def _open_shard(file: Path) -> tuple[Shard, str]:
    """Return the tokens of a file, and their dtype."""
    meta = file.with_name("meta.pkl")
    if meta.exists():  # nanoGPT's list of characters
        raise UserError(
            f"{meta} says that the tokens next to it stand for characters",
            f"Use text:{file.parent}/input.txt and --config.data.tokenizer=char",
        )
    remedy = "Leave it out of tokens:GLOB, or download it again"
    with reading(file, remedy), open(file, "rb") as stream:
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
        raise UserError(f"{file} holds {dtype}, not uint16 or uint32", remedy)
    itemsize = np.dtype(dtype).itemsize
    if not is_right or not num_tokens or offset + num_tokens * itemsize != size:
        raise UserError(f"{file} is no file of {dtype} tokens, or is cut off", remedy)
    return Shard(str(file), offset // itemsize, num_tokens), dtype


def _cut(shards: Shards, num_first: int) -> tuple[Shards, Shards]:
    """Divide shards after `num_first` tokens."""
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


READERS = {"tokens:GLOB": _open_tokens}
