"""Read documents, cut them into parts, and assign each part to the training or validation split."""

import functools
import hashlib
import io
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from gpt2.config import DataConfig
from gpt2.errors import UserError, warn
from gpt2.utils.files import reading
from gpt2.utils.stores import Remote, local_path

# Documents with this number of characters or more are encoded in parts, unless the tokenizer must
# encode each document whole.
PART_CHARACTERS = 2**18
# If the tokenizer must encode documents whole, a document with more characters is an error.
WHOLE_CHARACTERS = 2**26
# In a corpus of up to this number of documents, the sizes of the documents help to determine which
# documents are for validation.
WEIGHED = 2**14
# Matches a text up to its last space or newline that follows a character other than white space.
# There, GPT-2's pattern always begins a new piece. If a document is cut there, the tokens of its
# parts are therefore the tokens of the document.
PART_END = re.compile(r".*\S(?=[ \n])", re.DOTALL)

# A document is its text, or a UTF-8 file that contains the text.
Document = str | Path | Remote
ReadDocuments = Callable[[], Iterable[Document]]  # a call starts a new iteration


class Part(NamedTuple):
    """A part of a document's text, and the split (train or validation) that contains it."""

    split: str
    text: str
    starts_document: bool


class Measured(NamedTuple):
    """A document that contains text, with its size."""

    document: Document
    position: float  # in [0, 1), computed from a hash of the content
    num_bytes: int


class Documents:
    """The documents of a corpus, without empty ones. With `data.unique`, each text occurs once.

    Each call of `read` starts a new iteration over all documents. If there are several documents, a
    hash of the content determines the split of a document, so that equal documents are in the same
    split. In a corpus of at most WEIGHED documents, their sizes also matter; see `_choose_by_size`.
    If there is only one document, its last `val_fraction` of characters is for validation.
    """

    def __init__(self, read: ReadDocuments, data: DataConfig):
        self._read_documents = read
        self._data = data
        # The number of all documents, and the number of documents without text, in the newest
        # iteration.
        self.num_documents = 0
        self.num_empty = 0
        first = list(itertools.islice(self._read(), 2))
        if not first:
            raise UserError(
                f"data.corpus={data.corpus} contains no text", "Choose another corpus"
            )
        self.many = len(first) > 1
        self._first = first[0].document
        # `Measured.position` of each document for validation, if sizes determine the split.
        self._validation = set[float]()
        if self.many:
            self._validation = _choose_by_size(self._read(), data.val_fraction)

    def training_texts(self) -> Iterator[str]:
        """Yield the texts from which a tokenizer's vocabulary is built.

        They are the training split or, for the tokenizer `char`, both splits.
        """
        for part in self.parts(whole=False):
            # The vocabulary of `char` also needs the characters of the validation split.
            if part.split == "train" or self._data.tokenizer == "char":
                yield part.text

    def parts(self, *, whole: bool) -> Iterator[Part]:
        """Yield the parts of all documents.

        A text is cut into parts, so that a long text need not be in memory at once. If `whole`,
        texts are not cut, and each document is one part. If the corpus has only one document, this
        document is always divided between the splits, so with `whole` it becomes two parts.
        """
        if not self.many:
            yield from _split_text(self._first, self._data.val_fraction, whole=whole)
            return
        for document, position, _ in self._read():
            is_validation = position < self._data.val_fraction
            if self._validation:
                is_validation = position in self._validation
            split = "validation" if is_validation else "train"
            starts_document = True
            for text in read_parts(document, whole=whole):
                yield Part(split, text, starts_document)
                starts_document = False

    def _read(self) -> Iterator[Measured]:
        # With `data.unique`, this set needs about a hundred bytes for each document.
        seen = set[bytes]()
        self.num_documents = 0
        self.num_empty = 0
        for document in self._read_documents():
            content_hash = hashlib.sha256()
            num_bytes = 0
            for text in read_parts(document):
                content = text.encode("utf-8")
                content_hash.update(content)
                num_bytes += len(content)
            digest = content_hash.digest()
            self.num_documents += 1
            self.num_empty += not num_bytes
            if not num_bytes or digest in seen:
                continue
            if self._data.unique:
                seen.add(digest)
            position = int.from_bytes(digest[:6]) / 2**48
            yield Measured(document, position, num_bytes)


def _choose_by_size(documents: Iterable[Measured], val_fraction: float) -> set[float]:
    """Choose documents for validation that have about `val_fraction` of all bytes.

    Return their positions (`Measured.position`). Documents are considered in the order of their
    positions. A document is chosen, unless the chosen documents would then have more than
    `val_fraction` of all bytes. If every document is too large, the smallest one is chosen. For
    more than WEIGHED documents, return an empty set: sizes are then not needed, because a fraction
    of many documents has about the same fraction of their bytes.
    """
    sizes = defaultdict[float, int](int)  # equal documents have the same position
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
    # Sorting makes the choice deterministic if several documents are the smallest.
    return chosen or {min(sorted(sizes), key=sizes.__getitem__)}


def _split_text(
    document: Document, val_fraction: float, *, whole: bool
) -> Iterator[Part]:
    """Split a text as nanoGPT does, and yield its parts.

    The last `val_fraction` of characters is for validation. If `whole`, each split is one part.
    """
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
    """Yield a document's text in parts.

    A text is cut only at matches of `PART_END`, so that the tokens of the parts are the tokens of
    the text. If `whole`, yield the text as one part, for tokenizers that cannot encode parts.
    """
    text = ""
    # A document that is a str has no path, and is too long to be quoted in a message.
    name = "A document" if isinstance(document, str) else str(document)
    with reading(name), _open_text(document) as stream:
        while chunk := stream.read(PART_CHARACTERS):
            text += chunk
            if whole:
                if len(text) > WHOLE_CHARACTERS:
                    raise UserError(
                        f"{name} has more than {WHOLE_CHARACTERS:,} characters. This is too many"
                        " for the tokenizer of a tokenizer.json, which encodes each document whole",
                        "Divide the document, or use --config.data.tokenizer=gpt2 or bpe:SIZE",
                    )
            elif len(text) >= PART_CHARACTERS:
                # The text before this chunk contains no point at which it can be cut.
                searched = max(len(text) - len(chunk) - 1, 0)
                if end := PART_END.match(text, searched):
                    yield text[: end.end()]
                    text = text[end.end() :]
    if text:
        yield text


def group_parts(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Yield the parts in lists, to encode the parts of a list in one call.

    Each list has at least PART_CHARACTERS characters, except the last one.
    """
    group = list[Part]()
    num_characters = 0
    for part in parts:
        group.append(part)
        num_characters += len(part.text)
        if num_characters >= PART_CHARACTERS:
            yield group
            group = []
            num_characters = 0
    if group:
        yield group


def _open_text(document: Document) -> TextIO:
    if isinstance(document, str):
        # JSON and Python strings may contain unpaired surrogates, which UTF-8 cannot encode.
        text = document.encode("utf-8", "replace").decode("utf-8")
        if text != document:
            _warn_of_halves()
        return io.StringIO(text, newline="")
    return open(local_path(document), encoding="utf-8-sig", newline="")


@functools.cache  # one warning for all documents
def _warn_of_halves() -> None:
    warn(
        "some documents contain unpaired surrogates, which UTF-8 cannot encode; each"
        " of them is replaced with ?"
    )
