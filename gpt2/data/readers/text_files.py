"""Documents in local files or at a URL: plain text, JSON Lines, or Parquet."""

import io
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

from gpt2.data.preparing.text_corpus import TextCorpus
from gpt2.data.source_files import SourceFiles, find_paths, match_files
from gpt2.utils.files import reading
from gpt2.utils.stores import local_path

# The end of a JSON Lines file's name -> pyarrow's name of the compression.
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}


def split_field(argument: str) -> tuple[str, str]:
    """Split `NAME#FIELD` at the last `#` into the name and the field.

    If the whole argument matches files, whose names may contain `#`, do not split it. If the field
    is left out, it is `text`.
    """
    name, mark, field = argument.rpartition("#")
    if not mark or find_paths(argument):
        return argument, "text"
    return name, field or "text"


def _open_text(pattern: str) -> TextCorpus:
    """Open a corpus in which each file that matches the glob or URL `pattern` is a document."""
    source = SourceFiles(partial(match_files, pattern), "text")
    return TextCorpus(source, lambda: source.paths, source.num_bytes)


def _open_records(
    argument: str, kind: str, read: Callable[[str, IO[bytes], str], Iterator[str]]
) -> TextCorpus:
    """Open a corpus in which each text that `read(name, file, field)` yields is a document.

    `argument` is `GLOB#FIELD`. `kind`, such as `jsonl`, names the reader in the hash of the corpus,
    because another reader could read other texts from the same files.
    """
    pattern, field = split_field(argument)
    source = SourceFiles(partial(match_files, pattern), kind, field)

    def documents() -> Iterator[str]:
        num_before = 0
        for file in source.paths:
            path = local_path(file)
            with reading(file):
                stream = path.open("rb")
            with stream:
                for text in read(str(file), stream, field):
                    source.bytes_read = num_before + stream.tell()
                    yield text
            num_before += path.stat().st_size

    return TextCorpus(source, documents, source.num_bytes)


def _read_json_lines(name: str, file: IO[bytes], field: str) -> Iterator[str]:
    """Yield the value of `field` in each line of a JSON Lines file, which may be compressed.

    Null becomes an empty string. Blank lines are skipped. `name` appears in error messages.
    """
    import pyarrow

    remedy = "Give jsonl:GLOB#FIELD, where FIELD of every line is a string or null"
    with reading(name):
        compression = _COMPRESSIONS.get(Path(file.name).suffix)
        stream = pyarrow.input_stream(file, compression)
        for number, line in enumerate(io.BufferedReader(stream, 1 << 20), 1):
            if not line.strip():
                continue
            with reading(f"{name}:{number}", remedy):
                text = json.loads(line)[field]
                if not isinstance(text, str | None):
                    raise TypeError(f"the field {field!r} is not a string")
            yield text or ""


def read_parquet(name: str, file: IO[bytes], column: str) -> Iterator[str]:
    """Yield the texts in a column of a Parquet file, row by row. Null becomes an empty string.

    `name` appears in error messages.
    """
    import pyarrow.parquet

    with reading(name, "Give Parquet files, and one of their columns after #"):
        table = pyarrow.parquet.ParquetFile(file)
        table.schema_arrow.field(column)  # raises an error if the column does not exist
        for batch in table.iter_batches(batch_size=1024, columns=[column]):
            for text in batch.column(0).to_pylist():
                if not isinstance(text, str | None):
                    raise TypeError(f"the column {column!r} does not contain strings")
                yield text or ""


READERS: dict[str, Callable[[str], TextCorpus]] = {
    "text:GLOB": _open_text,
    "jsonl:GLOB#FIELD": partial(_open_records, kind="jsonl", read=_read_json_lines),
    "parquet:GLOB#COLUMN": partial(_open_records, kind="parquet", read=read_parquet),
}
