"""Documents -> training and validation tokens, encoded in parallel, never all in memory."""

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
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from gpt2.config import DataConfig
from gpt2.data.corpus import Corpus, Document, reading
from gpt2.data.tokenizer import Tokenizer, build, load
from gpt2.data.tokens import TokenWriter
from gpt2.errors import UserError, tell
from gpt2.utils import files
from gpt2.utils.cluster import open_pool
from gpt2.utils.stores import at_hand
from gpt2.utils.text import format_bytes, format_count, format_duration

SPLITS = ("train", "validation")
PART_CHARACTERS = (
    2**18
)  # longer documents are encoded in parts, shorter ones several at once
AHEAD = 32  # groups of parts to encode while a save waits for the disk
WEIGHED = (
    2**14
)  # documents; corpora of up to as many are read once more, for their sizes
SAVED_TOKENS = 2**24  # written between two moments from which a preparation goes on
SECONDS = 10  # between lines that tell how far it is
PROGRESS = "progress.json"  # what is written up to such a moment
# A part ends where GPT-2's pattern must start anew, so that its tokens are the document's.
PART_END = re.compile(r".*\S(?=[ \n])", re.DOTALL)


@dataclass(frozen=True)
class Part:
    """A part of a document."""

    split: str
    text: str
    document: int  # its number in the corpus
    starts_document: bool


Encoded = tuple[Part, np.ndarray, int]
Measured = tuple[
    int, Document, float, int
]  # its number, it, its position in [0, 1), its bytes


def write_splits(
    corpus: Corpus, data: DataConfig, directory: Path, ray: Any = None
) -> dict:
    """Writes the tokenizer and the tokens of both splits; returns what `prepared.json` tells.

    If there are several documents, each gets an end-of-text token before it. A hash of its content
    decides its split, so that equal documents share one. A single text gets no such token, and its
    last `val_fraction` of characters is the validation split. A `directory` that holds a part of
    all this is completed: it becomes what it would have become at once.
    """
    documents = Documents(corpus, data)
    done, parts = _resume(directory, documents)
    totals = done["splits"]
    if not done["parts"]:
        everything = (
            data.tokenizer == "char"
        )  # of which validation may lack no character
        texts = (p.text for p in documents.parts() if everything or p.split == "train")
        built = build(
            data.tokenizer,
            texts,
            many_documents=documents.many,
            end_of_text=data.end_of_text,
        )
        built.save(directory / "tokenizer.json")
    tokenizer = load(directory / "tokenizer.json")
    if (eot := tokenizer.eot) is None and documents.many:
        what = f"{data.tokenizer} names no token to put between documents"
        raise UserError(what, "Name one by --config.data.end_of_text=TOKEN")
    writer = TokenWriter(directory, tokenizer.vocab_size)
    writer.shards = done["shards"]
    writer.crc32 = done["token_crc32"]
    done["dtype"] = writer.dtype.name
    for name, _, count in itertools.chain(
        *(shards[-1:] for shards in writer.shards.values())
    ):
        os.truncate(directory / name, count * writer.dtype.itemsize)
    unsaved = 0
    num_bytes = sum(total["num_bytes"] for total in totals.values())
    before, began = num_bytes, (told := time.monotonic())
    for part, tokens, lost in encode_in_parallel(tokenizer, parts, ray):
        text = part.text.encode("utf-8")
        if part.starts_document and documents.many:
            tokens = np.append(np.int32(eot or 0), tokens)
        writer.append(part.split, tokens)
        total = totals[part.split]
        total["num_tokens"] += len(tokens)
        total["num_bytes"] += len(text)
        total["num_documents"] += part.starts_document
        total["num_lost"] += lost
        done["parts"] = 1 + (done["parts"] if part.document == done["document"] else 0)
        done["document"] = part.document
        unsaved += len(tokens)
        if unsaved >= min(SAVED_TOKENS, max(data.shuffle_block or SAVED_TOKENS, 2**20)):
            unsaved, done["text_crc32"] = 0, zlib.crc32(text)
            files.sync_tree(directory)  # before what says that it is there
            files.write_json(directory / PROGRESS, files.seal(done))
        num_bytes += len(text)
        if (now := time.monotonic()) > told + SECONDS:
            told = now
            speed = (num_bytes - before) / (now - began)
            sums = {
                n: format_count(sum(each[n] for each in totals.values())) for n in total
            }
            line = f"{sums['num_documents']} documents, {sums['num_tokens']} tokens, "
            left = format_duration(max(corpus.num_bytes - num_bytes, 0) / speed)
            line += f"{format_bytes(speed)}/s" + f", {left} left" * (
                corpus.num_bytes > 0
            )
            tell(line, sys.stdout)
    what = f"data.val_fraction={data.val_fraction} leaves a split of data.corpus={data.corpus!r} "
    what += f"empty: it holds {num_bytes} bytes"
    how = "Choose a longer text, more documents that differ, or another fraction"
    if min(totals[split]["num_tokens"] for split in data.splits) < 2:
        raise UserError(what, how)
    return {
        "splits": totals,
        "token_crc32": writer.crc32,
        "shards": writer.shards,
        "dtype": writer.dtype.name,
        "num_dropped": documents.num_dropped,
    }


def _resume(
    directory: Path, documents: "Documents"
) -> tuple[dict[str, Any], Iterator[Part]]:
    """Returns what a directory holds of a corpus, nothing if that was another, and what follows."""
    if done := files.read_sealed(directory / PROGRESS):
        parts = documents.parts(done["document"])
        last = deque(itertools.islice(parts, done["parts"]), 1)
        if last and zlib.crc32(last[0].text.encode()) == done["text_crc32"]:
            (directory / PROGRESS).touch()  # which others may believe
            tell(f"going on after document {done['document']:,}", sys.stdout)
            return done, parts
    (directory / PROGRESS).unlink(missing_ok=True)
    totals = dict(num_tokens=0, num_bytes=0, num_documents=0, num_lost=0)
    new: dict[str, Any] = dict(
        document=0, parts=0
    )  # the last document's number, parts of it
    new |= dict(shards={s: [] for s in SPLITS}, token_crc32=dict.fromkeys(SPLITS, 0))
    return new | {"splits": {s: dict(totals) for s in SPLITS}}, documents.parts()


class Documents:
    """The documents of a corpus that hold text, under `data.unique` each text once."""

    def __init__(self, corpus: Corpus, data: DataConfig):
        self._corpus = corpus
        self._data = data
        self.num_dropped = 0  # by the last iteration: their text came before
        first = [document for _, document, *_ in itertools.islice(self._read(), 2)]
        if not first:
            raise UserError(
                f"data.corpus={data.corpus!r} holds no text", "Choose another corpus"
            )
        self.many = len(first) > 1
        self._first = first[0]
        self._held_out = set[float]()
        if self.many and corpus.num_bytes:
            self._held_out = _weigh(self._read(), data.val_fraction)

    def parts(self, start: int = 0) -> Iterator[Part]:
        """Yields the parts of all documents from number `start` on."""
        if not self.many:
            yield from _split_text(self._first, self._data.val_fraction)
            return
        chosen = self._held_out
        for number, document, position, _ in self._read(start):
            is_validation = (
                position in chosen if chosen else position < self._data.val_fraction
            )
            split = "validation" if is_validation else "train"
            for index, text in enumerate(read_parts(document)):
                yield Part(split, text, number, starts_document=index == 0)

    def _read(self, start: int = 0) -> Iterator[Measured]:
        unique = self._data.unique
        seen = defaultdict[bytes, bytearray](bytearray)
        first = 0 if unique else start
        self.num_dropped = 0
        seek = self._corpus.seek or (
            lambda n: itertools.islice(self._corpus.documents(), n, None)
        )
        for number, document in enumerate(seek(first), first):
            digest, size = _measure(document)
            if unique and size:
                alike = seen[
                    digest[:2]
                ]  # 16 bytes of each hash: no set, which takes 100
                if digest[:16] in alike:
                    self.num_dropped += 1
                    continue
                alike += digest[:16]
            if size and number >= start:
                yield number, document, int.from_bytes(digest[:6]) / 2**48, size


def encode_in_parallel(
    tokenizer: Tokenizer, parts: Iterable[Part], ray: Any
) -> Iterator[Encoded]:
    """Yields each part with its tokens, int32 [num_tokens], and the bytes lost, in order."""

    def encode(group: list[Part]) -> list[Encoded]:
        return [
            (p, *tokenizer.encode_part(p.text, starts=p.starts_document)) for p in group
        ]

    waiting: deque[Future[list[Encoded]]] = deque()
    with open_pool(ray) as (num_workers, submit):
        for group in _groups(parts):
            waiting.append(submit(encode, group))
            if len(waiting) > 2 * num_workers + AHEAD:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def read_parts(document: Document) -> Iterator[str]:
    """Yields a document's text in parts whose tokens, joined, are the document's."""
    if isinstance(document, str):
        yield from _cut(io.StringIO(document, newline=""))
    else:
        with (
            reading(document),
            open(at_hand(document), encoding="utf-8-sig", newline="") as stream,
        ):
            yield from _cut(stream)


def _cut(stream: TextIO) -> Iterator[str]:
    left = ""
    while chunk := stream.read(PART_CHARACTERS):
        left += chunk
        if len(left) >= PART_CHARACTERS:
            found = PART_END.match(left)
            end = found.end() if found else len(left)
            yield left[:end]
            left = left[end:]
    if left:
        yield left


def _groups(parts: Iterable[Part]) -> Iterator[list[Part]]:
    group = []
    size = 0
    for part in parts:
        group.append(part)
        size += len(part.text)
        if size >= PART_CHARACTERS:
            yield group
            group = []
            size = 0
    if group:
        yield group


def _measure(document: Document) -> tuple[bytes, int]:
    """Returns the SHA-256 of a document's text, and its bytes."""
    digest = hashlib.sha256()
    size = 0
    for text in read_parts(document):
        content = text.encode("utf-8")
        digest.update(content)
        size += len(content)
    return digest.digest(), size


def _weigh(documents: Iterable[Measured], val_fraction: float) -> set[float]:
    """Returns the positions of the documents that make up `val_fraction` of all bytes.

    It takes documents in order of position, as far as they fit, the smallest if none fits. A share
    of the documents is any share of the bytes where they are few; many give an empty set.
    """
    weighed = [
        (position, size)
        for *_, position, size in itertools.islice(documents, WEIGHED + 1)
    ]
    if len(weighed) > WEIGHED:
        return set()
    all_positions, all_sizes = zip(*weighed, strict=True)
    positions, places = np.unique(all_positions, return_inverse=True)
    sizes = np.bincount(places, all_sizes)
    left = val_fraction * sizes.sum()
    chosen = set()
    for position, size in zip(positions.tolist(), sizes.tolist(), strict=True):
        if size <= left:
            chosen.add(position)
            left -= size
    return chosen or {float(positions[sizes.argmin()])}


def _split_text(document: Document, val_fraction: float) -> Iterator[Part]:
    """Splits as nanoGPT does: the first characters for training, the last ones for validation."""
    num_train = int(sum(map(len, read_parts(document))) * (1 - val_fraction))
    position = 0
    for text in read_parts(document):
        cut = max(num_train - position, 0)
        if text[:cut]:
            yield Part("train", text[:cut], 0, starts_document=position == 0)
        if text[cut:]:
            yield Part(
                "validation", text[cut:], 0, starts_document=position <= num_train
            )
        position += len(text)
