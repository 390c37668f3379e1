"""Tokens that another program has stored. Their files are read in place.

nanoGPT writes .bin files without a header, llm.c and modded-nanogpt write .bin files with a header,
and build-nanogpt writes .npy files.
"""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from gpt2.config import DataConfig
from gpt2.data.interfaces import Corpus, Dataset
from gpt2.data.preparing.prepared_folder import TOKENIZER, prepare_tokens
from gpt2.data.source_files import SourceFiles, match_files
from gpt2.data.tokenizer import build
from gpt2.data.tokens import PreparedTokens, Shard, Split, TokenStream
from gpt2.errors import UserError
from gpt2.utils.files import reading
from gpt2.utils.stores import local_path

HEADER = 256  # length of llm.c's header in int32 numbers (dev/data/data_common.py)
# The dtype of tokens by magic number and version, for GPT-2's tokens and for Llama 3's tokens.
FORMATS = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
VALIDATION = re.compile(r"(?<![a-z])val(idation)?(?![a-z])", re.IGNORECASE)
TEST = re.compile(r"(?<![a-z])test(?![a-z])", re.IGNORECASE)
Shards = list[Shard]


def _open_tokens(pattern: str) -> "TokenCorpus":
    paths = [local_path(file).absolute() for file in match_files(pattern)]
    source = SourceFiles(partial(match_files, pattern), "tokens", *map(str, paths))
    return TokenCorpus(source, paths)


@dataclass(frozen=True)
class TokenCorpus(Corpus):
    """A corpus of files that contain tokens.

    A file whose name contains the word `val` or `validation` is for validation. If no file has such
    a name, or if all files do, the last `val_fraction` of all tokens is for validation.
    """

    source: SourceFiles
    paths: Sequence[Path]  # local paths

    def prepare(self, data: DataConfig) -> Dataset:
        """Return the tokens. They are not copied, but read from their files."""
        return prepare_tokens(data, self.source, self.write)

    def write(self, data: DataConfig, directory: Path) -> PreparedTokens:
        """Write the tokenizer to `directory`, and count the documents and bytes of the tokens.

        Return the tokens, which stay in their own files. Raise a UserError if a token is not in the
        tokenizer's vocabulary.
        """
        if data.unique:
            raise UserError(
                f"data.unique=True drops repeated texts, but data.corpus={data.corpus} contains "
                "tokens",
                "Leave data.unique out",
            )
        shards, dtype = self._find_shards(data)
        tokenizer = build(data.tokenizer, end_of_text=data.end_of_text)
        if dtype == "uint16" and tokenizer.vocab_size > 2**16:
            raise UserError(
                f"The tokens of {data.corpus} are stored as uint16, but {tokenizer.name} has "
                f"{tokenizer.vocab_size} tokens, more than uint16 can distinguish",
                "Store the tokens as uint32, or set --config.data.tokenizer to the tokenizer that "
                "made them",
            )
        tokenizer.save(directory / TOKENIZER)
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
                        f"The {name} files of {data.corpus} contain token {largest}, but "
                        f"{tokenizer.name} has only {tokenizer.vocab_size} tokens",
                        "Set --config.data.tokenizer to the tokenizer that made the tokens",
                    )
                text = tokens[tokens != tokenizer.eot]
                # The bytes of a token may depend on its neighbours, so only decoding the text
                # yields the exact number of bytes. Bits per byte need this number, but only for
                # validation.
                if name == "validation":
                    split.num_bytes += len(tokenizer.decode_bytes(text))
                else:
                    split.num_bytes += int(token_bytes[text].sum())
                split.num_documents += len(tokens) - len(text)
                split.crc32 = zlib.crc32(tokens.astype(dtype), split.crc32)
            split.num_documents = max(split.num_documents, 1)
            splits[name] = split
        return PreparedTokens(directory, tokenizer, splits, dtype)

    def _find_shards(self, data: DataConfig) -> tuple[dict[str, Shards], str]:
        """Return the shards of each split, and the dtype of their tokens."""
        shards: dict[str, Shards] = {"train": [], "validation": []}
        dtypes = set[str]()
        for path in self.paths:
            shard, dtype = _open_shard(path)
            dtypes.add(dtype)
            if TEST.search(path.name):
                raise UserError(
                    f"data.corpus={data.corpus} matches the test split {path.name}",
                    "Give a pattern that matches only files of training and validation",
                )
            is_validation = VALIDATION.search(path.name)
            shards["validation" if is_validation else "train"].append(shard)
        if len(dtypes) > 1:
            raise UserError(
                f"data.corpus={data.corpus} matches both uint16 and uint32 files",
                "Give a pattern that matches files of one dtype",
            )
        if not all(shards.values()):
            joined = shards["train"] + shards["validation"]
            num_tokens = sum(shard.num_tokens for shard in joined)
            num_train = int(num_tokens * (1 - data.val_fraction))
            shards = _cut(joined, num_train)
        return shards, dtypes.pop()


def _open_shard(file: Path) -> tuple[Shard, str]:
    """Return a shard with all tokens of a file, and the dtype of the tokens.

    Raise a UserError if the file has none of the formats that the module's docstring lists.
    """
    meta = file.with_name("meta.pkl")
    if meta.exists():  # nanoGPT stores its list of characters in this file
        raise UserError(
            f"{file} cannot be read, because its tokens stand for the characters listed in {meta}",
            f"Use --config.data.corpus=text:{file.parent}/input.txt --config.data.tokenizer=char",
        )
    remedy = "Leave this file out of tokens:GLOB, or download it again"
    with reading(file, remedy), file.open("rb") as stream:
        size = file.stat().st_size
        start = stream.read(4 * HEADER)
        first = np.frombuffer(start[: size // 4 * 4], np.int32)
        offset = 0
        if start.startswith(b"\x93NUMPY"):
            array = np.load(file, mmap_mode="r")
            if not array.flags.c_contiguous or not array.dtype.isnative:
                raise UserError(
                    f"The array in {file} is not in little-endian byte order, or not in C order",
                    "Load it, and save it again with np.save(path, np.ascontiguousarray(array, "
                    "array.dtype.newbyteorder('<')))",
                )
            dtype = array.dtype.name
            offset = array.offset
            num_tokens = array.size
        elif len(first) == HEADER and first[0] // 10_000 == 2024:
            # llm.c's magic numbers are dates.
            magic, version, num_tokens = first[:3].tolist()
            dtype = FORMATS.get((magic, version), "unknown")
            offset = 4 * HEADER
        else:
            # Among a thousand bytes of tokens, some have a value of at most 8. Text contains no
            # such bytes.
            if file.suffix != ".bin" or min(start, default=255) > 8:
                raise ValueError("it does not contain tokens")
            dtype = _find_dtype(start, size)
            num_tokens = size // np.dtype(dtype).itemsize
    if dtype not in ("uint16", "uint32"):
        raise UserError(
            f"The dtype of the tokens in {file} is {dtype}, not uint16 or uint32",
            remedy,
        )
    itemsize = np.dtype(dtype).itemsize
    if not num_tokens or offset + num_tokens * itemsize != size:
        raise UserError(
            f"{file} has no tokens, or its size does not fit its number of {dtype} tokens",
            remedy,
        )
    return Shard(str(file), offset // itemsize, num_tokens), dtype


def _find_dtype(start: bytes, size: int) -> str:
    """Guess the dtype of the tokens in a .bin file without a header.

    `size` is the size of the file in bytes, and `start` contains its first bytes. Return the widest
    dtype with which all tokens in `start` are below 2**18. If neither uint64 nor uint32 fulfils
    this condition, return uint16.
    """
    for dtype in ("uint64", "uint32"):
        is_divisible = size % np.dtype(dtype).itemsize == 0
        if is_divisible and np.frombuffer(start, dtype).max() < 2**18:
            return dtype
    return "uint16"


def _cut(shards: Shards, num_train: int) -> dict[str, Shards]:
    """Divide shards into the splits `train` and `validation`.

    The first `num_train` tokens are for training. A shard that contains the boundary is cut there.
    """
    train = Shards()
    validation = Shards()
    for file, skip, num_tokens in shards:
        head = min(num_train, num_tokens)
        num_train -= head
        if head:
            train.append(Shard(file, skip, head))
        if head < num_tokens:
            validation.append(Shard(file, skip + head, num_tokens - head))
    return {"train": train, "validation": validation}


READERS = {"tokens:GLOB": _open_tokens}
