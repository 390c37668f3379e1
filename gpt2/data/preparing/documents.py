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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np

from gpt2.config import DataConfig
from gpt2.data.preparing.prepared_folder import PROGRESS, StoredCorpus
from gpt2.data.source_files import SourceFiles
from gpt2.data.tokenizer import Tokenizer, build, load
from gpt2.data.tokens import PreparedTokens, Split, TokenWriter
from gpt2.errors import UserError, log, warn
from gpt2.utils import files
from gpt2.utils.files import reading
from gpt2.utils.stores import Remote, local_path
from gpt2.utils.text import format_count

# Longer documents are encoded in parts, if the tokenizer allows it.
PART_CHARACTERS = 2**18
# The longest document that is encoded at once, if the tokenizer does not.
WHOLE_CHARACTERS = 2**26
AHEAD = 32  # parts to encode while a save waits for the disk
# A corpus of up to this number of documents is read once more, for their sizes.
WEIGHED = 2**14
SAVED_TOKENS = 2**24  # written between two saves, from which a preparation continues
SECONDS = 10  # between lines on the progress
TOKENIZER = "tokenizer.json"
# Where GPT-2's pattern begins a new token, so that the tokens of two parts are the document's.
PART_END = re.compile(r".*\S(?=[ \n])", re.DOTALL)

# A document is its text, or a UTF-8 file that holds it.
Document = str | Path | Remote


class Part(NamedTuple):
    """A part of a document."""

    split: str
    text: str
    starts_document: bool


# A part with its tokens, and the number of its bytes that they do not decode to.
Encoded = tuple[Part, np.ndarray, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextCorpus(StoredCorpus):
    """Documents in an order that never changes.

    If there are several, an end-of-text token opens each, and a hash of its content decides its
    split, so that equal documents are in the same one. A single text gets no such token, and its
    last `val_fraction` of characters is the validation split.
    """

    documents: Callable[[], Iterable[Document]]  # starts an iteration over all
    num_bytes: int = 0  # of text, about; 0: not known in advance

    @classmethod
    def from_files(
        cls, files: SourceFiles, documents: Callable[[], Iterable[Document]]
    ) -> "TextCorpus":
        """Return the documents that files hold."""
        return cls(
            fingerprint=files.fingerprint,
            files=files,
            documents=documents,
            num_bytes=files.num_bytes,
        )

    def write(self, data: DataConfig, directory: Path) -> PreparedTokens:
        """Write the tokenizer and the tokens, and continue what an earlier attempt has written.

        The folder becomes what it would have become in one attempt.
        """
        documents = Documents(self, data)
        progress, tokenizer, parts = _resume(directory, documents, data)
        if tokenizer.eot is None and documents.many:
            raise UserError(
                f"data.tokenizer={data.tokenizer} has no token to put between documents",
                "Name one by --config.data.end_of_text=TOKEN",
            )
        opening = np.array([tokenizer.eot or 0], np.int32)
        writer = TokenWriter(directory, tokenizer.vocab_size, progress.splits)
        unsaved = 0
        reported = time.monotonic()
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
            if time.monotonic() > reported + SECONDS:
                reported = time.monotonic()
                line = f"{format_count(progress.sum('num_tokens'))} tokens"
                if self.num_bytes:
                    fraction = progress.sum("num_bytes") / self.num_bytes
                    line += f", {fraction:.0%} of the text"
                log(line, sys.stdout)
        writer.close()
        return PreparedTokens(directory, tokenizer, progress.splits, writer.dtype.name)


# The progress of a preparation, from which it continues after a kill


@dataclasses.dataclass
class Progress:
    """What has been written of a corpus, after a number of parts."""

    splits: dict[str, Split]
    parts: int = 0
    text_crc32: int = 0  # of the last part's text
    # Digests of the tokenizer, and of the files of tokens.
    digests: files.Digests = dataclasses.field(default_factory=dict)

    def save(self, directory: Path) -> None:
        """Write all tokens to the disk, and then the file that says so."""
        written = set[str]()
        for split in self.splits.values():  # a kill may have left other files
            written.update(file for file, _, _ in split.shards)
        written -= self.digests.keys()
        self.digests |= files.digest_files(directory, written)
        files.sync_tree(directory)
        files.write_json(directory / PROGRESS, files.seal(dataclasses.asdict(self)))

    def sum(self, count: str) -> int:
        """Return a count over both splits."""
        return sum(getattr(split, count) for split in self.splits.values())

    def add(self, part: Part, num_lost: int) -> None:
        """Count a part whose tokens have been written."""
        text = part.text.encode("utf-8")
        split = self.splits[part.split]
        split.num_bytes += len(text)
        split.num_documents += part.starts_document
        split.num_lost += num_lost
        self.parts += 1
        self.text_crc32 = zlib.crc32(text)


def _resume(
    directory: Path, documents: "Documents", data: DataConfig
) -> tuple[Progress, Tokenizer, Iterator[Part]]:
    """Return the progress of a folder, its tokenizer, and the parts that are still to be written.

    A folder that is damaged, or that holds another corpus, is cleared and begun again.
    """
    saved = files.read_sealed(directory / PROGRESS)
    damage = saved and files.find_damage(directory, saved["digests"])
    if damage:
        warn(f"{directory} is damaged ({damage}), and is begun again")
    elif saved:
        progress = Progress(**saved)
        for name, facts in saved["splits"].items():
            progress.splits[name] = Split(**facts)
        tokenizer = load(directory / TOKENIZER)
        parts = documents.parts(tokenizer)
        text = ""
        for part in itertools.islice(parts, progress.parts):
            text = part.text
        if zlib.crc32(text.encode()) == progress.text_crc32:
            number = progress.sum("num_documents")
            log(f"continuing after document {number:,}", sys.stdout)
            return progress, tokenizer, parts
    for path in directory.iterdir():
        path.unlink()
    tokenizer = build(
        data.tokenizer,
        documents.training_texts(),
        many_documents=documents.many,
        end_of_text=data.end_of_text,
    )
    tokenizer.save(directory / TOKENIZER)
    digests = files.digest_files(directory, [TOKENIZER])
    progress = Progress({"train": Split(), "validation": Split()}, digests=digests)
    return progress, tokenizer, documents.parts(tokenizer)


# Documents -> parts


class Measured(NamedTuple):
    """A document with text."""

    document: Document
    position: float  # in [0, 1), by a hash of its content
    num_bytes: int


class Documents:
    """The documents of a corpus that hold text; with `data.unique` each text once."""

    def __init__(self, corpus: TextCorpus, data: DataConfig):
        self._corpus = corpus
        self._data = data
        first = list(itertools.islice(self._read(), 2))
        if not first:
            raise UserError(
                f"data.corpus={data.corpus} holds no text", "Choose another corpus"
            )
        self.many = len(first) > 1
        self._first = first[0].document
        self._validation = set[float]()  # positions
        if self.many and corpus.num_bytes:
            self._validation = _choose_by_size(self._read(), data.val_fraction)

    def parts(self, tokenizer: Tokenizer) -> Iterator[Part]:
        """Yield the parts that a tokenizer may encode one by one."""
        yield from self._parts(whole=not tokenizer.encodes_parts)

    def training_texts(self) -> Iterator[str]:
        """Yield the texts that a vocabulary is made from."""
        for part in self._parts(whole=False):
            # `char` has to know the characters of the validation split, too.
            if part.split == "train" or self._data.tokenizer == "char":
                yield part.text

    def _parts(self, *, whole: bool) -> Iterator[Part]:
        if not self.many:
            yield from _split_text(self._first, self._data.val_fraction, whole=whole)
            return
        for document, position, _ in self._read():
            is_validation = position < self._data.val_fraction
            if self._validation:
                is_validation = position in self._validation
            split = "validation" if is_validation else "train"
            for index, text in enumerate(read_parts(document, whole=whole)):
                yield Part(split, text, starts_document=index == 0)

    def _read(self) -> Iterator[Measured]:
        seen = set[bytes]()  # takes a hundred bytes for each document
        for document in self._corpus.documents():
            content_hash = hashlib.sha256()
            num_bytes = 0
            for text in read_parts(document):
                content = text.encode("utf-8")
                content_hash.update(content)
                num_bytes += len(content)
            digest = content_hash.digest()
            if not num_bytes or digest in seen:
                continue
            if self._data.unique:
                seen.add(digest)
            position = int.from_bytes(digest[:6]) / 2**48
            yield Measured(document, position, num_bytes)


def _choose_by_size(documents: Iterable[Measured], val_fraction: float) -> set[float]:
    """Return the positions of the documents that make up `val_fraction` of all bytes.

    It takes documents in the order of their positions while they fit, or the smallest one if none
    fits. It returns an empty set for many documents, where a fraction of the documents is about
    that fraction of the bytes.
    """
    sizes = defaultdict[float, int](int)  # equal documents have one position
    for count, document in enumerate(documents, 1):
        if count > WEIGHED:
            return set()
        sizes[document.position] += document.num_bytes
    left = val_fraction * sum(sizes.values())
    chosen = set[float]()
    for position in sorted(sizes):
        if sizes[position] <= left:
            chosen.add(position)
            left -= sizes[position]
    # Sorted, so that the first of several smallest ones is the same each time.
    return chosen or {min(sorted(sizes), key=sizes.__getitem__)}


def _split_text(
    document: Document, val_fraction: float, *, whole: bool
) -> Iterator[Part]:
    """Split as nanoGPT does: the first characters for training, the last ones for validation."""
    num_characters = sum(len(text) for text in read_parts(document))
    num_train = int(num_characters * (1 - val_fraction))
    position = 0
    for text in read_parts(document, whole=whole):
        cut = max(num_train - position, 0)
        if text[:cut]:
            yield Part("train", text[:cut], starts_document=position == 0)
        if text[cut:]:
            starts = position <= num_train
            yield Part("validation", text[cut:], starts_document=starts)
        position += len(text)


def read_parts(document: Document, *, whole: bool = False) -> Iterator[str]:
    """Yield a document's text in parts, whose tokens by GPT-2's pattern, joined, are its tokens.

    `whole` yields the text as one part, for tokenizers that have another pattern.
    """
    text = ""
    with reading(document), _open_text(document) as stream:
        while chunk := stream.read(PART_CHARACTERS):
            text += chunk
            if whole and len(text) > WHOLE_CHARACTERS:
                raise UserError(
                    f"A document has more than {WHOLE_CHARACTERS:,} characters, which a "
                    "tokenizer.json has to encode at once",
                    "Divide it into documents, or use --config.data.tokenizer=gpt2 or bpe:SIZE",
                )
            if not whole and len(text) >= PART_CHARACTERS:
                # What was read before has no such end.
                searched = max(len(text) - len(chunk) - 1, 0)
                if end := PART_END.match(text, searched):
                    yield text[: end.end()]
                    text = text[end.end() :]
    if text:
        yield text


def _open_text(document: Document) -> TextIO:
    if isinstance(document, str):
        # JSON and Python can spell half a surrogate pair, which UTF-8 cannot.
        text = document.encode("utf-8", "replace").decode("utf-8")
        return io.StringIO(text, newline="")
    return open(local_path(document), encoding="utf-8-sig", newline="")


# Parts -> tokens


def encode_in_parallel(
    tokenizer: Tokenizer, parts: Iterable[Part]
) -> Iterator[Encoded]:
    """Yield each part with its tokens, int32 [num_tokens], and the bytes lost, in order."""

    def encode(part: Part) -> Encoded:
        tokens, num_lost = tokenizer.encode_counting(part.text)
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
