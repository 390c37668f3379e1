"""Documents -> tokens in a folder, encoded in parallel. A preparation continues after a kill."""

import dataclasses
import itertools
import os
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from gpt2.config import DataConfig
from gpt2.data.interfaces import Corpus, Dataset
from gpt2.data.preparing.documents import Documents, Part, ReadDocuments
from gpt2.data.preparing.prepared_folder import PROGRESS, TOKENIZER, prepare_tokens
from gpt2.data.source_files import SourceFiles
from gpt2.data.tokenizer import Tokenizer, build, load
from gpt2.data.tokens import PreparedTokens, Split, TokenWriter
from gpt2.errors import UserError, log, warn
from gpt2.utils import files
from gpt2.utils.text import format_count

AHEAD = 32  # parts to encode while a save waits for the disk
SAVED_TOKENS = 2**24  # between two saves, from which a preparation continues
SECONDS = 10  # between lines on the progress


@dataclasses.dataclass(frozen=True)
class TextCorpus(Corpus):
    """Documents in an order that never changes.

    If there are several, an end-of-text token opens each. A single text gets no such token.
    """

    source: SourceFiles
    documents: ReadDocuments
    num_bytes: int = 0  # of text, about; 0: not known in advance

    def prepare(self, data: DataConfig) -> Dataset:
        """Return the tokens of the documents."""
        return prepare_tokens(data, self.source, self.write)

    def write(self, data: DataConfig, directory: Path) -> PreparedTokens:
        """Write the tokenizer and the tokens, and continue what an earlier attempt has written.

        The folder becomes what it would have become in one attempt.
        """
        documents = Documents(self.documents, data, weighs=self.num_bytes > 0)
        progress, tokenizer, parts = _resume(directory, documents, data)
        if documents.many and tokenizer.eot is None:
            raise UserError(
                f"data.tokenizer={data.tokenizer} has no token to put between documents",
                "Name one by --config.data.end_of_text=TOKEN",
            )
        opening = np.array([tokenizer.eot or 0], np.int32)
        writer = TokenWriter(directory, tokenizer.vocab_size, progress.splits)
        unsaved = 0
        reported = time.monotonic()
        for part, encoded in encode_in_parallel(tokenizer, parts):
            tokens, num_lost = encoded.result()
            if part.starts_document and documents.many:
                tokens = np.concatenate([opening, tokens])
            writer.append(part.split, tokens)
            progress.add(part, num_lost)
            unsaved += len(tokens)
            if unsaved >= SAVED_TOKENS:
                progress.save(directory, writer.flush())
                unsaved = 0
            if time.monotonic() > reported + SECONDS:
                reported = time.monotonic()
                line = f"{format_count(progress.sum('num_tokens'))} tokens"
                if self.num_bytes:
                    fraction = progress.sum("num_bytes") / self.num_bytes
                    line += f", {fraction:.0%} of the text"
                log(line, sys.stdout)
        writer.flush()
        return PreparedTokens(directory, tokenizer, progress.splits, writer.dtype.name)


def encode_in_parallel(
    tokenizer: Tokenizer, parts: Iterable[Part]
) -> Iterator[tuple[Part, Future[tuple[np.ndarray, int]]]]:
    """Yield each part, in order, with the result of `encode_counting`."""
    num_workers = os.cpu_count() or 1
    waiting = deque[tuple[Part, Future]]()
    with ThreadPoolExecutor(num_workers) as pool:
        for part in parts:
            encoded = pool.submit(tokenizer.encode_counting, part.text)
            waiting.append((part, encoded))
            if len(waiting) > 2 * num_workers + AHEAD:
                yield waiting.popleft()
        yield from waiting


@dataclasses.dataclass
class Progress:
    """What has been written of a corpus, after a number of parts."""

    splits: dict[str, Split]
    parts: int = 0
    text_crc32: int = 0  # of the last part's text
    # Digests of the tokenizer, and of the files of tokens.
    digests: files.Digests = dataclasses.field(default_factory=dict)

    def add(self, part: Part, num_lost: int) -> None:
        """Count a part, whose tokens the caller appends."""
        text = part.text.encode("utf-8")
        split = self.splits[part.split]
        split.num_bytes += len(text)
        split.num_documents += part.starts_document
        split.num_lost += num_lost
        self.parts += 1
        self.text_crc32 = zlib.crc32(text)

    def sum(self, count: str) -> int:
        """Return a count over both splits."""
        return sum(getattr(split, count) for split in self.splits.values())

    def save(self, directory: Path, written: list[str]) -> None:
        """Write the files of tokens to the disk, and then the file that says so."""
        self.digests |= files.digest_files(directory, written)
        files.sync_tree(directory)
        files.write_json(directory / PROGRESS, files.seal(dataclasses.asdict(self)))


def _resume(
    directory: Path, documents: Documents, data: DataConfig
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
        parts = documents.parts(whole=tokenizer.needs_whole)
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
    progress = Progress({"train": Split(), "validation": Split()})
    progress.digests = files.digest_files(directory, [TOKENIZER])
    return progress, tokenizer, documents.parts(whole=tokenizer.needs_whole)
