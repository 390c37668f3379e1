"""Documents -> training and validation tokens, encoded in parallel, never all in memory."""

import hashlib
import io
import itertools
import os
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TextIO

import numpy as np
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from gpt2.config import DataConfig
from gpt2.data.corpus import Corpus, Document, reading
from gpt2.data.tokenizer import Tokenizer, build
from gpt2.data.tokens import TokenWriter
from gpt2.errors import UserError
from gpt2.utils.stores import at_hand

SPLITS = ("train", "validation")
PART_CHARACTERS = 2**18  # longer documents are encoded in parts, shorter ones several at once
WEIGHED_BYTES = 2**30  # corpora up to this size are read once more, for their documents' sizes
# A part ends where GPT-2's pattern must start anew, so that its tokens are the document's.
PART_END = re.compile(r".*\S(?=[ \n])", re.DOTALL)


@dataclass(frozen=True)
class Part:
    """A part of a document."""

    split: str
    text: str
    starts_document: bool


Encoded = tuple[Part, np.ndarray, int]


def write_splits(corpus: Corpus, data: DataConfig, directory: Path) -> dict:
    """Writes the tokenizer and the tokens of both splits; returns what `prepared.json` tells.

    If there are several documents, each gets an end-of-text token before it. A hash of its content
    decides its split, so that equal documents share one. A single text gets no such token, and its
    last `val_fraction` of characters is the validation split.
    """
    many_documents, parts = split_documents(corpus, data)
    totals = {s: dict(num_tokens=0, num_bytes=0, num_documents=0, num_lost=0) for s in SPLITS}
    compressor, num_compressed = zlib.compressobj(9), 0
    screen = Console(stderr=True)
    columns = *Progress.get_default_columns(), TimeElapsedColumn()
    hidden = not (screen.is_interactive and screen.file.isatty())  # FORCE_COLOR fakes the former
    with Progress(*columns, console=screen, transient=True, disable=hidden) as bar:
        task = bar.add_task("reading", total=None)
        texts = training_texts(data.tokenizer, parts())
        tokenizer = build(
            data.tokenizer, texts, many_documents=many_documents, end_of_text=data.end_of_text
        )
        if many_documents and tokenizer.eot is None:
            what = f"{data.tokenizer} names no token to put between documents"
            raise UserError(what, "Name one by --config.data.end_of_text=TOKEN")
        tokenizer.save(directory / "tokenizer.json")
        bar.update(task, description="encoding", total=corpus.num_bytes or None)
        writer = TokenWriter(directory, tokenizer.vocab_size)
        for part, tokens, lost in encode_in_parallel(tokenizer, parts()):
            text = part.text.encode("utf-8")
            if part.starts_document and many_documents:
                tokens = np.concatenate([[tokenizer.eot], tokens])
            writer.append(part.split, tokens)
            total = totals[part.split]
            total["num_tokens"] += len(tokens)
            total["num_bytes"] += len(text)
            total["num_documents"] += part.starts_document
            total["num_lost"] += lost
            if part.split == "validation":
                num_compressed += len(compressor.compress(text))
            bar.advance(task, len(text))
        num_compressed += len(compressor.flush())
    if min(totals[split]["num_tokens"] for split in data.splits) < 2:
        raise UserError(
            f"data.val_fraction={data.val_fraction} leaves a split of data.corpus={data.corpus!r} "
            f"empty: it holds {sum(total['num_bytes'] for total in totals.values())} bytes",
            "Choose a longer text, more documents that differ, or another fraction",
        )
    return {
        "splits": totals,
        "zlib_bits_per_byte": 8 * num_compressed / totals["validation"]["num_bytes"],
        "token_crc32": writer.crc32,
        "shards": writer.shards,
        "dtype": writer.dtype.name,
    }


def training_texts(tokenizer: str, parts: Iterable[Part]) -> Iterator[str]:
    """Yields the text that a tokenizer is made of: that of the training split, for `char` all."""
    return (part.text for part in parts if tokenizer == "char" or part.split == "train")


def weave(texts: Sequence[Iterator[str]], shares: Sequence[Fraction]) -> Iterator[str]:
    """Yields texts of several sources, by their shares of the characters while all last."""
    given = dict.fromkeys(range(len(texts)), 0.0)
    while given:
        source = min(given, key=given.__getitem__)
        if (text := next(texts[source], None)) is None:
            del given[source]
        else:
            given[source] += len(text) / shares[source]
            yield text


def split_documents(corpus: Corpus, data: DataConfig) -> tuple[bool, Callable[[], Iterator[Part]]]:
    """Returns whether there are several documents, and what iterates over their parts."""

    def documents() -> Iterator[Document]:
        return (each for each in corpus.documents() if any(read_parts(each)))

    first = list(itertools.islice(documents(), 2))
    if not first:
        raise UserError(f"data.corpus={data.corpus!r} holds no text", "Choose another corpus")
    if len(first) == 1:
        return False, lambda: _split_text(first[0], data.val_fraction)
    is_weighed = 0 < corpus.num_bytes <= WEIGHED_BYTES
    held_out = _weigh(documents(), data.val_fraction) if is_weighed else None
    return True, lambda: _assign_documents(documents(), held_out, data.val_fraction)


def encode_in_parallel(tokenizer: Tokenizer, parts: Iterable[Part]) -> Iterator[Encoded]:
    """Yields each part with its tokens, int32 [num_tokens], and the bytes lost, in order.

    Threads suffice, since tiktoken and tokenizers release the interpreter lock while they work.
    Processes would each import JAX.
    """
    num_threads = os.cpu_count() or 1

    def encode(group: list[Part]) -> list[Encoded]:
        return [(p, *tokenizer.encode_part(p.text, starts=p.starts_document)) for p in group]

    waiting: deque[Future[list[Encoded]]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        for group in _groups(parts):
            waiting.append(pool.submit(encode, group))
            if len(waiting) > 2 * num_threads:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def read_parts(document: Document) -> Iterator[str]:
    """Yields a document's text in parts whose tokens, joined, are the document's."""
    if isinstance(document, str):
        yield from _cut(io.StringIO(document, newline=""))
    else:
        with reading(document), open(at_hand(document), encoding="utf-8-sig", newline="") as stream:
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
    group, size = [], 0
    for part in parts:
        group.append(part)
        size += len(part.text)
        if size >= PART_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _measure(document: Document) -> tuple[float, int]:
    """Returns a number in [0, 1) that depends on a document's content alone, and its bytes."""
    digest, size = hashlib.sha256(), 0
    for text in read_parts(document):
        content = text.encode("utf-8")
        digest.update(content)
        size += len(content)
    return int.from_bytes(digest.digest()[:6]) / 2**48, size


def _weigh(documents: Iterable[Document], val_fraction: float) -> list[bool]:
    """Returns for each document whether it is among those that make up `val_fraction` of all bytes.

    It takes documents in order of position, as far as they fit, the smallest if none fits. (A share
    of the documents would do for many documents, but can be any share of the bytes for few.)
    """
    sizes, positions = dict[float, int](), []
    for document in documents:
        position, size = _measure(document)
        positions.append(position)
        sizes[position] = sizes.get(position, 0) + size
    left, chosen = val_fraction * sum(sizes.values()), set()
    for position in sorted(sizes):
        if sizes[position] <= left:
            chosen.add(position)
            left -= sizes[position]
    chosen = chosen or {min(sizes, key=sizes.__getitem__)}
    return [position in chosen for position in positions]


def _assign_documents(
    documents: Iterable[Document], held_out: list[bool] | None, val_fraction: float
) -> Iterator[Part]:
    for index, document in enumerate(documents):
        is_validation = held_out[index] if held_out else _measure(document)[0] < val_fraction
        split = "validation" if is_validation else "train"
        for number, text in enumerate(read_parts(document)):
            yield Part(split, text, starts_document=number == 0)


def _split_text(document: Document, val_fraction: float) -> Iterator[Part]:
    """Splits as nanoGPT does: the first characters for training, the last ones for validation."""
    num_train = int(sum(map(len, read_parts(document))) * (1 - val_fraction))
    position = 0
    for text in read_parts(document):
        cut = max(num_train - position, 0)
        if text[:cut]:
            yield Part("train", text[:cut], starts_document=position == 0)
        if text[cut:]:
            yield Part("validation", text[cut:], starts_document=position <= num_train)
        position += len(text)
