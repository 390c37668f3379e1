"""Encode documents in parallel, and write their tokens to a folder.

If the process is killed, the next process continues the preparation.
"""

import dataclasses
import itertools
import os
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from gpt2.config import DataConfig
from gpt2.data.interfaces import Corpus, Dataset
from gpt2.data.preparing.documents import (
    Documents,
    Part,
    ReadDocuments,
    group_parts,
)
from gpt2.data.preparing.prepared_folder import PROGRESS, TOKENIZER, prepare_tokens
from gpt2.data.source_files import SourceFiles
from gpt2.data.tokenizer import Tokenizer, build, load
from gpt2.data.tokens import PreparedTokens, Split, TokenWriter
from gpt2.errors import UserError, log, warn
from gpt2.utils import files
from gpt2.utils.ray_cluster import RayExecutor, is_connected
from gpt2.utils.text import format_count

# Additional groups of parts that are encoded while a save waits for the disk.
AHEAD = 32
SAVED_TOKENS = 2**24  # smallest number of tokens between two saves of the progress
SECONDS = 10  # time between progress lines

Encoded = tuple[np.ndarray, int]  # the result of `Tokenizer.encode_counting`


@dataclasses.dataclass(frozen=True)
class TextCorpus(Corpus):
    """A corpus whose documents are always read in the same order.

    In the tokens, each document begins with an end-of-text token, unless it is the only document.
    """

    source: SourceFiles
    documents: ReadDocuments
    num_bytes: int = 0  # approximate size of the text; 0 if it is not known in advance

    def prepare(self, data: DataConfig) -> Dataset:
        """Return the tokens of the documents. If they are not prepared yet, prepare them first."""
        return prepare_tokens(data, self.source, self.write)

    def write(self, data: DataConfig, directory: Path) -> PreparedTokens:
        """Write the tokenizer and the tokens to `directory`, and return the tokens.

        If an earlier attempt was interrupted, continue it. The content of the folder is the same as
        without an interruption.
        """
        documents = Documents(self.documents, data)
        progress, tokenizer, parts = _resume(directory, documents, data)
        if documents.many and tokenizer.eot is None:
            raise UserError(
                f"data.tokenizer={data.tokenizer} has no token to put between documents",
                "Choose a token of its vocabulary. Name it with --config.data.end_of_text=TOKEN "
                "or, for eval.py, as eos_token in the tokenizer_config.json next to the "
                "tokenizer.json. Or use a corpus of a single text",
            )
        opening = np.array([tokenizer.eot or 0], np.int32)
        writer = TokenWriter(directory, tokenizer.vocab_size, progress.splits)
        unsaved = 0
        reported = time.monotonic()
        for part, (tokens, num_lost) in encode_in_parallel(tokenizer, parts):
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
                line = f"encoded {format_count(progress.sum('num_tokens'))} tokens"
                if self.num_bytes:
                    # `num_bytes` is the size of the files, which may be compressed. It is therefore
                    # compared with the bytes read from them, if these are counted.
                    done = self.source.bytes_read or progress.sum("num_bytes")
                    fraction = min(done / self.num_bytes, 1)
                    line += f", {fraction:.0%} of the text so far"
                log(line, sys.stdout)
        writer.flush()
        details = dict[str, str | int]()
        if self.source.revision:
            details["revision"] = self.source.revision
        if documents.num_empty:
            details["num_skipped"] = documents.num_empty
            counts = f"{documents.num_empty:,} of {documents.num_documents:,} documents"
            log(f"skipped {counts}, because they contain no text", sys.stdout)
        fraction = progress.splits["validation"].num_bytes / progress.sum("num_bytes")
        if fraction > 2 * data.val_fraction:
            warn(
                f"the validation split has {fraction:.0%} of the text instead of"
                f" {data.val_fraction:.1%}, because documents are not divided. With more or"
                " shorter documents, the split would be smaller"
            )
        dtype = writer.dtype.name
        return PreparedTokens(directory, tokenizer, progress.splits, dtype, details)


def encode_in_parallel(
    tokenizer: Tokenizer, parts: Iterable[Part]
) -> Iterator[tuple[Part, Encoded]]:
    """Yield each part, in order, with the result of `Tokenizer.encode_counting` for its text.

    Parts are encoded in threads or, if this process has joined a Ray cluster, on the nodes of the
    cluster.
    """

    def encode(texts: list[str]) -> list[Encoded]:
        return [tokenizer.encode_counting(text) for text in texts]

    executor: Executor
    if is_connected():
        executor = RayExecutor()
        num_workers = executor.num_workers
    else:
        num_workers = os.cpu_count() or 1
        executor = ThreadPoolExecutor(num_workers)
    waiting = deque[tuple[list[Part], Future[list[Encoded]]]]()
    with executor:
        for group in group_parts(parts):
            texts = [part.text for part in group]
            waiting.append((group, executor.submit(encode, texts)))
            if len(waiting) > 2 * num_workers + AHEAD:
                first, encoded = waiting.popleft()
                yield from zip(first, encoded.result(), strict=True)
        for group, encoded in waiting:
            yield from zip(group, encoded.result(), strict=True)


@dataclasses.dataclass
class Progress:
    """The state of a preparation after its first `parts` parts, from which it can continue."""

    splits: dict[str, Split]
    parts: int = 0
    text_crc32: int = 0  # CRC-32 of the last part's text
    # Digests of the tokenizer's file and of the token files.
    digests: files.Digests = dataclasses.field(default_factory=dict)

    def add(self, part: Part, num_lost: int) -> None:
        """Add a part to the counts of its split. The caller writes the part's tokens.

        `num_lost` is the number of the part's bytes that the tokens do not preserve.
        """
        text = part.text.encode("utf-8")
        split = self.splits[part.split]
        split.num_bytes += len(text)
        split.num_documents += part.starts_document
        split.num_lost += num_lost
        self.parts += 1
        self.text_crc32 = zlib.crc32(text)

    def sum(self, count: str) -> int:
        """Return the sum over both splits of a field of `Split`, such as `num_bytes`."""
        return sum(getattr(split, count) for split in self.splits.values())

    def save(self, directory: Path, written: list[str]) -> None:
        """Flush the token files to the disk, and then write the file that records the progress.

        `written` names the files in `directory` that are new since the last save.
        """
        self.digests |= files.digest_files(directory, written)
        files.sync_tree(directory)
        files.write_json(directory / PROGRESS, files.seal(dataclasses.asdict(self)))


def _resume(
    directory: Path, documents: Documents, data: DataConfig
) -> tuple[Progress, Tokenizer, Iterator[Part]]:
    """Return the progress recorded in a folder, its tokenizer, and the parts not written yet.

    If the folder records no progress, is damaged, or contains another corpus, delete its files
    first, and begin with a new tokenizer and all parts.
    """
    saved = files.read_sealed(directory / PROGRESS)
    damage = saved and files.find_damage(directory, saved["digests"])
    if damage:
        warn(f"{directory} is damaged ({damage}), so the preparation begins again")
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
