"""Documents -> training and validation tokens, encoded in parallel, never all in memory."""

import dataclasses
import hashlib
import io
import itertools
import os
import re
import sys
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np

from gpt2.config import DataConfig
from gpt2.data.corpus import Corpus, Document
from gpt2.data.dataset import Dataset
from gpt2.data.tokenizer import Tokenizer, build, load
from gpt2.data.tokens import Split, TokenWriter
from gpt2.errors import UserError, log, warn
from gpt2.utils import files
from gpt2.utils.files import reading
from gpt2.utils.stores import at_hand
from gpt2.utils.text import format_count

# Longer documents are encoded in parts.
PART_CHARACTERS = 2**18
AHEAD = 32  # parts to encode while a save waits for the disk
# Corpora of up to so many documents are read once more, for their sizes.
WEIGHED = 2**14
SAVED_TOKENS = 2**24  # written between two moments from which a preparation goes on
SECONDS = 10  # between lines that tell how far it is
TOKENIZER = "tokenizer.json"
PROGRESS = "written.json"  # what is written up to such a moment
# A part ends where GPT-2's pattern must start anew, so that its tokens are the document's.
PART_END = re.compile(r".*\S(?=[ \n])", re.DOTALL)


class Part(NamedTuple):
    """A part of a document."""

    split: str
    text: str
    starts_document: bool


# With its tokens, and the bytes of it that they do not give back.
Encoded = tuple[Part, np.ndarray, int]


def write_splits(corpus: Corpus, data: DataConfig, directory: Path) -> Dataset:
    """Writes the tokenizer and the tokens of both splits.

    If there are several documents, each gets an end-of-text token before it. A hash of its content
    decides its split, so that equal documents share one. A single text gets no such token, and its
    last `val_fraction` of characters is the validation split. A `directory` that holds a part of
    all this is completed: it becomes what it would have become at once.
    """
    documents = Documents(corpus, data)
    progress, parts = _resume(directory, documents)
    if not progress.digests:
        texts = _training_texts(documents.parts(), data.tokenizer)
        tokenizer = build(
            data.tokenizer,
            texts,
            many_documents=documents.many,
            end_of_text=data.end_of_text,
        )
        tokenizer.save(directory / TOKENIZER)
        progress.digests = files.digest_files(directory, [TOKENIZER])
    tokenizer = load(directory / TOKENIZER)
    if tokenizer.eot is None and documents.many:
        raise UserError(
            f"{data.tokenizer} names no token to put between documents",
            "Name one by --config.data.end_of_text=TOKEN",
        )
    opening = np.array([tokenizer.eot or 0], np.int32)
    writer = TokenWriter(directory, tokenizer.vocab_size, progress.splits)
    unsaved = 0
    told = time.monotonic()
    for part, tokens, num_lost in encode_in_parallel(tokenizer, parts):
        if part.starts_document and documents.many:
            tokens = np.concatenate([opening, tokens])
        writer.append(part.split, tokens)
        progress.add(part, num_lost)
        unsaved += len(tokens)
        if unsaved >= SAVED_TOKENS:
            writer.close()
            progress.save(directory)
            unsaved = 0
        if time.monotonic() > told + SECONDS:
            told = time.monotonic()
            line = f"{format_count(progress.sum('num_tokens'))} tokens"
            if corpus.num_bytes:
                share = progress.sum("num_bytes") / corpus.num_bytes
                line += f", {share:.0%} of the text"
            log(line, sys.stdout)
    writer.close()
    return Dataset(directory, tokenizer, progress.splits, writer.dtype.name)


# How far it is: a preparation that was cut goes on


@dataclasses.dataclass
class Progress:
    """How far a preparation is: after so many parts of all documents."""

    splits: dict[str, Split]
    parts: int = 0
    text_crc32: int = 0  # of the last part's text
    # Of the tokenizer, and of the tokens of all these parts.
    digests: files.Digests = dataclasses.field(default_factory=dict)

    def save(self, directory: Path) -> None:
        """Brings all that is written to the disk, and then what says that it is there."""
        written = set[str]()
        for split in self.splits.values():  # a kill may have left other files
            written.update(file for file, _, _ in split.shards)
        written -= self.digests.keys()
        self.digests |= files.digest_files(directory, written)
        files.sync_tree(directory)
        files.write_json(directory / PROGRESS, files.seal(dataclasses.asdict(self)))

    def sum(self, count: str) -> int:
        """Returns a count of both splits."""
        return sum(getattr(split, count) for split in self.splits.values())

    def add(self, part: Part, num_lost: int) -> None:
        """Counts a part whose tokens have been written."""
        text = part.text.encode("utf-8")
        split = self.splits[part.split]
        split.num_bytes += len(text)
        split.num_documents += part.starts_document
        split.num_lost += num_lost
        self.parts += 1
        self.text_crc32 = zlib.crc32(text)


def _resume(directory: Path, documents: "Documents") -> tuple[Progress, Iterator[Part]]:
    """Returns what a directory holds of a corpus, nothing if that was another, and what follows."""
    saved = files.read_sealed(directory / PROGRESS)
    if saved:
        progress = Progress(**saved)
        for name, facts in saved["splits"].items():
            progress.splits[name] = Split(**facts)
        parts = documents.parts()
        text = ""
        for part in itertools.islice(parts, progress.parts):
            text = part.text
        damage = files.find_damage(directory, progress.digests)
        if damage:
            warn(f"{directory} is damaged ({damage}), and is begun anew")
        elif zlib.crc32(text.encode()) == progress.text_crc32:
            number = progress.sum("num_documents")
            log(f"going on after document {number:,}", sys.stdout)
            return progress, parts
    for path in directory.iterdir():
        path.unlink()
    splits = {"train": Split(), "validation": Split()}
    return Progress(splits), documents.parts()


# Documents -> parts


class Measured(NamedTuple):
    """A document with text."""

    document: Document
    position: float  # in [0, 1), by a hash of its content
    size: int  # bytes


class Documents:
    """The documents of a corpus that hold text, under `data.unique` each text once."""

    def __init__(self, corpus: Corpus, data: DataConfig):
        self._corpus = corpus
        self._data = data
        first = [each.document for each in itertools.islice(self._read(), 2)]
        if not first:
            raise UserError(
                f"data.corpus={data.corpus!r} holds no text", "Choose another corpus"
            )
        self.many = len(first) > 1
        self._first = first[0]
        self._held_out = set[float]()  # positions
        if self.many and corpus.num_bytes:
            self._held_out = _weigh(self._read(), data.val_fraction)

    def parts(self) -> Iterator[Part]:
        """Yields the parts of all documents."""
        if not self.many:
            yield from _split_text(self._first, self._data.val_fraction)
            return
        for document, position, _ in self._read():
            is_held_out = position < self._data.val_fraction
            if self._held_out:
                is_held_out = position in self._held_out
            split = "validation" if is_held_out else "train"
            for index, text in enumerate(read_parts(document)):
                yield Part(split, text, starts_document=index == 0)

    def _read(self) -> Iterator[Measured]:
        seen = set[bytes]()  # takes a hundred bytes for each document
        for document in self._corpus.documents():
            hashed = hashlib.sha256()
            size = 0  # bytes
            for text in read_parts(document):
                content = text.encode("utf-8")
                hashed.update(content)
                size += len(content)
            digest = hashed.digest()
            if not size or digest in seen:
                continue
            if self._data.unique:
                seen.add(digest)
            position = int.from_bytes(digest[:6]) / 2**48
            yield Measured(document, position, size)


def _weigh(documents: Iterable[Measured], val_fraction: float) -> set[float]:
    """Returns the positions of the documents that make up `val_fraction` of all bytes.

    It takes documents in order of position, as far as they fit, the smallest if none fits. A share
    of the documents is any share of the bytes where they are few; many give an empty set.
    """
    sizes = defaultdict[float, int](int)  # of equal documents, their sum
    for count, each in enumerate(documents, 1):
        if count > WEIGHED:
            return set()
        sizes[each.position] += each.size
    left = val_fraction * sum(sizes.values())
    chosen = set[float]()
    for position in sorted(sizes):
        if sizes[position] <= left:
            chosen.add(position)
            left -= sizes[position]
    # The first of the smallest ones.
    return chosen or {min(sorted(sizes), key=sizes.__getitem__)}


def _split_text(document: Document, val_fraction: float) -> Iterator[Part]:
    """Splits as nanoGPT does: the first characters for training, the last ones for validation."""
    num_characters = sum(len(text) for text in read_parts(document))
    num_train = int(num_characters * (1 - val_fraction))
    position = 0
    for text in read_parts(document):
        cut = max(num_train - position, 0)
        if text[:cut]:
            yield Part("train", text[:cut], starts_document=position == 0)
        if text[cut:]:
            starts = position <= num_train
            yield Part("validation", text[cut:], starts_document=starts)
        position += len(text)


def read_parts(document: Document) -> Iterator[str]:
    """Yields a document's text in parts whose tokens, joined, are the document's."""
    left = ""
    with reading(document), _open_text(document) as stream:
        while chunk := stream.read(PART_CHARACTERS):
            left += chunk
            if len(left) >= PART_CHARACTERS:
                found = PART_END.match(left)
                end = found.end() if found else len(left)
                yield left[:end]
                left = left[end:]
    if left:
        yield left


def _open_text(document: Document) -> TextIO:
    if isinstance(document, str):
        # JSON and Python can spell half a surrogate pair, which UTF-8 cannot.
        text = document.encode("utf-8", "replace").decode("utf-8")
        return io.StringIO(text, newline="")
    return open(at_hand(document), encoding="utf-8-sig", newline="")


# Parts -> tokens


def encode_in_parallel(
    tokenizer: Tokenizer, parts: Iterable[Part]
) -> Iterator[Encoded]:
    """Yields each part with its tokens, int32 [num_tokens], and the bytes lost, in order."""

    def encode(part: Part) -> Encoded:
        tokens, num_lost = tokenizer.encode_part(part.text, starts=part.starts_document)
        return part, tokens, num_lost

    num_workers = os.cpu_count() or 1
    waiting: deque[Future[Encoded]] = deque()
    with ThreadPoolExecutor(num_workers) as pool:
        for part in parts:
            waiting.append(pool.submit(encode, part))
            if len(waiting) > 2 * num_workers + AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _training_texts(parts: Iterable[Part], tokenizer: str) -> Iterator[str]:
    """Yields what a vocabulary is made from. Validation may lack no character of `char`."""
    for part in parts:
        if part.split == "train" or tokenizer == "char":
            yield part.text
