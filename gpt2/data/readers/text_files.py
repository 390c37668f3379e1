"""Documents in files, here or at a URL: plain text, lines of JSON, or Parquet."""

import functools
import io
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

from gpt2.data.preparing.text_corpus import TextCorpus
from gpt2.data.source_files import SourceFiles, find_paths, match_files
from gpt2.errors import warn
from gpt2.utils.files import reading
from gpt2.utils.stores import local_path

_warn_once = functools.cache(warn)  # a corpus is read several times


def split_field(argument: str) -> tuple[str, str]:
    """Split `NAME#FIELD` at the last `#`, unless files have all of it as their name.

    The field is `text` if it is left out.
    """
    name, mark, field = argument.rpartition("#")
    if not mark or find_paths(argument):
        return argument, "text"
    return name, field or "text"


def _open_text(pattern: str) -> TextCorpus:
    """Each file is a document."""
    source = SourceFiles(partial(match_files, pattern), "text")
    return TextCorpus(source, lambda: source.paths, source.num_bytes)


def _open_records(
    argument: str, kind: str, read: Callable[[str, Path, str], Iterator[str]]
) -> TextCorpus:
    """Each record that `read` finds in the files of `GLOB#FIELD` is a document."""
    pattern, field = split_field(argument)
    source = SourceFiles(partial(match_files, pattern), kind, field)

    def documents() -> Iterator[str]:
        for file in source.paths:
            yield from read(str(file), local_path(file), field)

    return TextCorpus(source, documents, source.num_bytes)


def _read_json_lines(name: str, path: Path, field: str) -> Iterator[str]:
    """Each line of *.jsonl, also as .gz or .zst, is an object whose FIELD is a document."""
    import pyarrow

    remedy = "Each line must be an object with a text: jsonl:GLOB#FIELD"
    with reading(name):
        # It decompresses a file whose name ends so.
        stream = pyarrow.input_stream(str(path))
        for number, line in enumerate(io.BufferedReader(stream, 1 << 20), 1):
            if not line.strip():
                continue
            with reading(f"{name}:{number}", remedy):
                text = json.loads(line)[field]
                if not isinstance(text, str):
                    raise TypeError(f"{field!r} is no text")
            yield text


def read_parquet(name: str, file: Path | IO[bytes], column: str) -> Iterator[str]:
    """Each row's COLUMN of a Parquet file is a document. A row that is null is an empty text."""
    import pyarrow.parquet

    with reading(name, "Give Parquet files, and after # one of their columns"):
        table = pyarrow.parquet.ParquetFile(file)
        table.schema_arrow.field(column)  # fails here if there is no such column
        num_missing = 0
        for batch in table.iter_batches(batch_size=1024, columns=[column]):
            texts = batch.column(0)
            num_missing += texts.null_count
            for text in texts.to_pylist():
                if not isinstance(text, str | None):
                    raise TypeError(f"column {column!r} holds no text")
                yield text or ""
        if num_missing:
            rows = f"{num_missing:,} of {table.metadata.num_rows:,} rows of {name}"
            _warn_once(f"{rows} are null in {column!r}, and left out")


READERS: dict[str, Callable[[str], TextCorpus]] = {
    "text:GLOB": _open_text,
    "jsonl:GLOB#FIELD": partial(_open_records, kind="jsonl", read=_read_json_lines),
    "parquet:GLOB#COLUMN": partial(_open_records, kind="parquet", read=read_parquet),
}
