"""Corpora, by prefix: where documents come from. `READERS` lists all; a new prefix is one entry."""

import contextlib
import functools
import glob
import hashlib
import importlib
import io
import json
import os
import random
import socket
import sys
import sysconfig
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2.errors import UserError, warn
from gpt2.utils.stores import Remote, at_hand, find, is_url

# Files of up to this size in all are hashed at every start; of more, size and time count.
_HASHED_BYTES = 1 << 26

_warn_once = functools.cache(warn)  # a corpus is read several times

File = Path | Remote
# A document is its text, or a UTF-8 file that holds it.
Document = str | File


@dataclass(frozen=True)
class Corpus:
    """A source of documents, in an order that never changes."""

    fingerprint: (
        str  # differs whenever the documents may differ; computing it needs no network
    )
    documents: Callable[[], Iterator[Document]]  # starts an iteration over them
    num_bytes: int = (
        0  # about how many bytes of text there are; 0: not known in advance
    )
    seek: Callable[[int], Iterator[Document]] | None = (
        None  # leaves out so many, unread
    )


def open_corpus(spec: str) -> Corpus:
    """Returns the corpus that `data.corpus` names; reads no text yet."""
    prefix, _, argument = spec.partition(":")
    usage, open_ = READERS.get(prefix, ("", None))
    if open_ is None or (":" in usage) != bool(argument):
        usages = ", ".join(
            [usage] if usage else [u for u, _ in READERS.values()] + ["tokens:GLOB"]
        )
        raise UserError(
            f"data.corpus={spec!r} names no corpus", f"Write one of: {usages}"
        )
    return open_(argument)


def lies_in_files(spec: str) -> bool:
    """Returns whether `data.corpus` names files, which can move."""
    return spec.partition(":")[0] in ("text", "jsonl", "parquet", "tokens")


def find_files(pattern: str) -> Sequence[File]:
    """Returns the files that a glob (`**` included) matches, sorted by name: at least one."""
    found = (
        []
        if is_url(pattern)
        else glob.glob(str(Path(pattern).expanduser()), recursive=True)
    )
    found.sort(key=lambda name: (len(name), name), reverse=True)
    names = {
        os.path.realpath(name): name for name in found
    }  # links may lead to one in many ways
    files: Sequence[File] = [
        Path(p) for p in sorted(names.values()) if Path(p).is_file()
    ]
    if not (files := find(pattern) if is_url(pattern) else files):
        raise UserError(
            f"data.corpus: no file matches {pattern!r} in {Path.cwd()}",
            "Give a path, or a glob such as 'books/**/*.txt'",
        )
    return files


@contextlib.contextmanager
def reading(file: File | str) -> Iterator[None]:
    """Turns an error in reading `file` into a `UserError` that names it."""
    try:
        yield
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(
            f"{file} cannot be read ({error})",
            "Leave it out, mend it or convert it to UTF-8",
        ) from error


def file_fingerprint(files: Sequence[File], *more: str) -> str:
    """Returns a hash of the paths of files, of what they hold, and of `more`."""
    is_read = _total_size(files) <= _HASHED_BYTES

    def part(file: File) -> tuple:
        if isinstance(file, Remote):
            return file.url, file.version
        about = file.stat()
        differs = (
            [_hash_content(file)] if is_read else [about.st_size, about.st_mtime_ns]
        )
        return str(file.absolute()), *differs

    parts = [part(file) for file in files]
    return hashlib.sha256(json.dumps([parts, more]).encode()).hexdigest()


def _hash_content(path: Path) -> str:
    with reading(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _total_size(files: Sequence[File]) -> int:
    return sum(f.size if isinstance(f, Remote) else f.stat().st_size for f in files)


def _place_and_field(argument: str) -> tuple[str, str]:
    """Splits `PLACE#FIELD`; the field is `text` if left out."""
    place, _, field = argument.partition("#")
    return place, field or "text"


def _text(pattern: str) -> Corpus:
    """Each file is a document."""
    files = find_files(pattern)
    fingerprint = file_fingerprint(files, "text")
    size = _total_size(files)
    return Corpus(
        fingerprint, lambda: iter(files), size, seek=lambda number: iter(files[number:])
    )


def _pystdlib(_: str) -> Corpus:
    """The modules of the running Python's standard library, one document each.

    Its tests are left out: not every system installs them, and they are as long as all the rest.
    """
    root = Path(sysconfig.get_path("stdlib"))
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = (
            set(folders) - excluded
        )  # site-packages may hold ten times as many files
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files.sort()

    def documents() -> Iterator[str]:
        for file in files:
            # A few modules are written in other encodings.
            with reading(file), contextlib.suppress(UnicodeDecodeError):
                yield file.read_bytes().decode("utf-8-sig")

    return Corpus(file_fingerprint(files, "pystdlib"), documents, _total_size(files))


def _synthetic(_: str) -> Corpus:
    """Four thousand documents of sums, for tests and benchmarks: the same everywhere, quick."""
    num_documents = 4000
    num_lines = 60

    def documents() -> Iterator[str]:
        rng = random.Random(0)
        for number in range(num_documents):
            lines = [f"# {number}\n"]
            for _ in range(num_lines):
                a, b = divmod(int(rng.random() * 10_000), 100)
                lines.append(f"{a} + {b} = {a + b}\n")
            yield "".join(lines)

    return Corpus(f"synthetic-{num_documents}-{num_lines}", documents, 3_400_000)


def import_function(argument: str) -> Callable:
    """Returns a user's function, `MODULE:FUNCTION`."""
    module_name, _, name = argument.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"data.corpus=python:{argument} cannot be imported ({error})",
            "Write python:MODULE:FUNCTION, of a module in this folder or on PYTHONPATH",
        ) from error


def _python(argument: str) -> Corpus:
    """A function of the user's own, `MODULE:FUNCTION`, that returns an iterable of documents.

    Its text is prepared once for each content of the module's file.
    """
    function = import_function(argument)
    source = Path(sys.modules[argument.partition(":")[0]].__file__ or "")

    def documents() -> Iterator[str]:
        texts = function()
        for text in texts:
            wrong = isinstance(texts, str) or not isinstance(text, str)
            if wrong:
                raise UserError(
                    f"python:{argument} has to return an iterable of str, its documents"
                )
            yield text

    return Corpus(file_fingerprint([source], "python", argument), documents)


def _jsonl(argument: str) -> Corpus:
    """Each line of *.jsonl, also as .gz or .zst, is an object whose FIELD is a document."""
    pattern, field = _place_and_field(argument)
    files = find_files(pattern)

    def documents() -> Iterator[str]:
        import pyarrow

        for file in files:
            path = str(at_hand(file))
            with (
                reading(file),
                pyarrow.input_stream(path, buffer_size=1 << 20) as stream,
            ):
                lines = io.BufferedReader(
                    stream, 1 << 20
                )  # decompressed, as the name tells
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _json_field(line, field, f"{file}:{number}")

    return Corpus(
        file_fingerprint(files, "jsonl", field), documents, _total_size(files)
    )


def _json_field(line: bytes, field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{where} is not JSON ({error})", "Each line must be an object"
        ) from error
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UserError(
            f"{where} has no text in {field!r}", "Name the field: jsonl:GLOB#FIELD"
        )
    # JSON can spell half a surrogate pair, which UTF-8 cannot.
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _parquet(argument: str) -> Corpus:
    """Each row's COLUMN is a document."""
    pattern, column = _place_and_field(argument)
    files = find_files(pattern)

    def documents(skip: int = 0) -> Iterator[str]:
        for file in files:
            skip = yield from _parquet_column(at_hand(file), column, str(file), skip)

    fingerprint = file_fingerprint(files, "parquet", column)
    size = _total_size(files)
    return Corpus(fingerprint, documents, size, seek=documents)


def _parquet_column(
    file: Any, column: str, name: str, skip: int
) -> Generator[str, None, int]:
    """Yields one string column of a Parquet file, given by path or open, batch by batch.

    Rows that are null are empty texts. `skip` rows are left out; it returns how many more to skip.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
        if column not in table.schema_arrow.names:
            names = ", ".join(table.schema_arrow.names)
            raise UserError(
                f"{name} has no column {column!r}", f"Write one behind #: {names}"
            )
        missing = 0
        groups = [*range(table.num_row_groups)]
        while groups and skip >= (rows := table.metadata.row_group(groups[0]).num_rows):
            skip -= rows
            del groups[0]
        for batch in table.iter_batches(
            batch_size=1024, row_groups=groups, columns=[column]
        ):
            missing += batch.column(0).null_count
            for text in batch.column(0)[skip:].to_pylist():
                if not isinstance(text, str | None):
                    raise UserError(
                        f"column {column!r} of {name} holds no text", "Choose another"
                    )
                yield text or ""
            skip = max(skip - len(batch), 0)
        if missing:
            rows = f"{missing:,} of {table.metadata.num_rows:,} rows of {name}"
            _warn_once(f"{rows} are null in {column!r}, and left out")
        return skip
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(
            f"{name} cannot be read ({error})", "Give Parquet files"
        ) from error


def _hugging_face(argument: str) -> Corpus:
    """The training split of a data set, streamed from the hub's Parquet copy of it."""
    name, column = _place_and_field(argument)

    def documents(skip: int = 0) -> Iterator[str]:
        from huggingface_hub import HfFileSystem

        try:
            hub: Any = HfFileSystem()
            root = f"datasets/{name}@refs/convert/parquet"
            subsets = sorted(
                hub.ls(root, detail=False), key=lambda p: not p.endswith("/default")
            )
            folders = hub.ls(
                next(p for p in subsets if "." not in Path(p).name), detail=False
            )
            # Of a large data set the hub converts a first part, and calls it so.
            (train,) = (
                p for p in folders if Path(p).name in ("train", "partial-train")
            )
            for path in sorted(hub.ls(train, detail=False)):
                with hub.open(path) as file:
                    skip = yield from _parquet_column(file, column, path, skip)
        except UserError:
            raise
        except (
            Exception
        ) as error:  # of the hub's library: network, access, no such data set
            raise UserError(
                f"hf:{name} cannot be read ({type(error).__name__}: {error})",
                "Check name and network; --config.data.corpus=pystdlib needs none",
            ) from error

    return Corpus(f"hf-{name}-{column}", documents, seek=documents)


def _tfds(argument: str) -> Corpus:
    """The training split of a data set of the TensorFlow Datasets catalogue."""
    name, feature = _place_and_field(argument)

    def documents() -> Iterator[str]:
        import tensorflow_datasets as tfds

        try:
            builder = tfds.builder(name)
            if not builder.is_prepared():
                builder = tfds.builder(name, file_format="array_record")
                # Without a network TFDS would try for minutes.
                socket.create_connection(
                    ("storage.googleapis.com", 443), timeout=5
                ).close()
                builder.download_and_prepare()
            for record in _tfds_records(builder):
                text = record[feature]
                yield (
                    text.decode("utf-8", "replace")
                    if isinstance(text, bytes)
                    else str(text)
                )
        except (
            tfds.core.DatasetNotFoundError,
            LookupError,
            NotImplementedError,
            OSError,
        ) as error:
            raise UserError(
                f"tfds:{argument} cannot be read ({type(error).__name__}: {error})",
                "Check name and network; --config.data.corpus=pystdlib needs none",
            ) from error

    return Corpus(f"tfds-{name}-{feature}", documents)


def _tfds_records(builder: Any) -> Iterator[Any]:
    """Yields the records of a training split; TFRecord files need no TensorFlow."""
    if builder.info.file_format.value != "tfrecord":
        yield from builder.as_data_source(split="train")
        return
    from grain.experimental import TFRecordIterDataset

    for path in builder.info.splits["train"].filepaths:
        try:
            records = TFRecordIterDataset(str(path))
            yield from map(builder.info.features.deserialize_example_np, records)
        except ValueError:  # which holds all of the bytes
            raise UserError(
                f"{path} ends within a record", "Download it again"
            ) from None


# Prefix -> how to write it, and what opens it. tokens.py opens ready tokens: no documents.
READERS: dict[str, tuple[str, Callable[[str], Corpus]]] = {
    "pystdlib": ("pystdlib", _pystdlib),
    "text": ("text:GLOB", _text),
    "jsonl": ("jsonl:GLOB#FIELD", _jsonl),
    "parquet": ("parquet:GLOB#COLUMN", _parquet),
    "tfds": ("tfds:NAME#FEATURE", _tfds),
    "hf": ("hf:OWNER/NAME#COLUMN", _hugging_face),
    "python": ("python:MODULE:FUNCTION", _python),
    "synthetic": ("synthetic", _synthetic),
}
