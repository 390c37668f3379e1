"""Corpora, by prefix: where documents come from.

`READERS` lists all of them. A new prefix is one more entry there.
"""

import contextlib
import difflib
import glob
import gzip
import hashlib
import json
import os
import random
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpt2.data import hub
from gpt2.errors import UserError

# Files of up to this size in all are hashed at every start.
_HASHED_BYTES = 1 << 26

# A document is its text, or the path of a UTF-8 file that holds it.
Document = str | Path


@dataclass(frozen=True)
class Corpus:
    """A source of documents, in an order that never changes.

    Attributes:
        fingerprint: differs whenever the documents may differ. Computing it needs no network.
        documents: starts an iteration over the documents; raises `UserError` when they cannot be
            read.
        num_bytes: about how many bytes of text there are; 0: not known in advance.
    """

    fingerprint: str
    documents: Callable[[], Iterator[Document]]
    num_bytes: int = 0


def open_corpus(spec: str) -> Corpus:
    """Returns the corpus that `data.corpus` names; reads no text yet.

    Raises:
        UserError: the prefix is unknown, or no file matches.
    """
    prefix, colon, argument = spec.partition(":")
    if prefix not in READERS:
        usages = [*(reader.usage for reader in READERS.values()), "tokens:GLOB"]
        near = difflib.get_close_matches(prefix, [*READERS, "tokens"], n=1, cutoff=0.7)
        meant = f"Did you mean {near[0]}? " if near else ""
        meant = f"For the text of this file, write text:{spec}. " if Path(spec).is_file() else meant
        raise UserError(
            f"data.corpus={spec!r} is not a known corpus",
            f"{meant}Choose one of: {', '.join(usages)}",
        )
    reader = READERS[prefix]
    if (":" in reader.usage) != bool(argument) or (colon and not argument):
        raise UserError(f"data.corpus={spec!r} does not name a corpus", f"Write {reader.usage}")
    return reader.open(argument)


def lies_in_files(spec: str) -> bool:
    """Returns whether `data.corpus` names files of this machine, which can move."""
    prefix = spec.partition(":")[0]
    return prefix == "tokens" or (prefix in READERS and "GLOB" in READERS[prefix].usage)


def _split_argument(argument: str) -> tuple[str, str]:
    """Returns the place and the field of `PLACE#FIELD`; the field is `text` if left out."""
    place, _, field = argument.partition("#")
    return place, field or "text"


def find_files(pattern: str) -> list[Path]:
    """Returns the files that a glob (`**` included) matches, sorted by name.

    Raises:
        UserError: no file matches.
    """
    expanded = str(Path(pattern).expanduser())
    files = [Path(p) for p in sorted(glob.glob(expanded, recursive=True)) if Path(p).is_file()]
    if not files:
        where = "" if Path(expanded).is_absolute() else f" in {Path.cwd()}"
        raise UserError(
            f"data.corpus: no file matches {pattern!r}{where}", _advise_on_glob(expanded)
        )
    return files


def _advise_on_glob(pattern: str) -> str:
    """Returns what to write in place of a glob that matches no file."""
    path = Path(pattern)
    if path.is_dir():
        return (
            f"That is a folder: for the files in it write a glob, such as {path / '**' / '*.txt'}"
        )
    if glob.has_magic(path.name) and "**" not in pattern:
        below = glob.iglob(str(path.parent / "*" / path.name))  # no deeper, which may be endless
        if any(map(os.path.isfile, below)):
            return f"Folders in it hold such files: write {path.parent / '**' / path.name} there"
    return "Give a path, or a glob of files that exist"


@contextlib.contextmanager
def reading(file: Path | str) -> Iterator[None]:
    """Turns an error in reading `file` into a `UserError` that names it."""
    try:
        yield
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(
            f"{file} cannot be read ({error})", "Leave it out, mend it or convert it to UTF-8"
        ) from error


def file_fingerprint(files: list[Path], *more: str) -> str:
    """Returns a hash of the paths of files, of what they hold, and of `more`.

    Files of more than `_HASHED_BYTES` in all are not read: sizes and modification times stand for
    what they hold.
    """
    if _total_size(files) <= _HASHED_BYTES:
        parts: list[tuple] = [(str(f.absolute()), _hash_content(f)) for f in files]
    else:
        parts = [(str(f.absolute()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(json.dumps([parts, more]).encode()).hexdigest()


def _hash_content(path: Path) -> str:
    with reading(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _total_size(files: list[Path]) -> int:
    return sum(f.stat().st_size for f in files)


def _text(pattern: str) -> Corpus:
    """Each file is a document."""
    files = find_files(pattern)
    fingerprint = file_fingerprint(files, "text")
    return Corpus(fingerprint, lambda: iter(files), _total_size(files))


def _pystdlib(_: str) -> Corpus:
    """The modules of the running Python's standard library, one document each.

    Its tests are left out: not every system installs them, and they are as long as all the rest.
    """
    root = Path(sysconfig.get_path("stdlib"))
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = [f for f in sorted(root.rglob("*.py")) if not excluded & set(f.relative_to(root).parts)]
    if not files:
        raise UserError(
            f"This Python has no standard library source in {root}",
            "Choose another corpus. For example, use --config.data.corpus='text:books/*.txt'",
        )

    def documents() -> Iterator[str]:
        for file in files:
            with reading(file):
                content = file.read_bytes()
            try:
                yield content.decode("utf-8")
            except UnicodeDecodeError:  # a few modules are written in other encodings
                continue

    return Corpus(file_fingerprint(files, "pystdlib"), documents, _total_size(files))


def _synthetic(_: str) -> Corpus:
    """Four thousand documents of sums, for tests and benchmarks: the same everywhere, quick."""
    num_documents, num_lines = 4000, 60

    def documents() -> Iterator[str]:
        rng = random.Random(0)
        for number in range(num_documents):
            lines = [f"# {number}\n"]
            for _ in range(num_lines):
                a, b = divmod(int(rng.random() * 10_000), 100)
                lines.append(f"{a} + {b} = {a + b}\n")
            yield "".join(lines)

    return Corpus(f"synthetic-{num_documents}-{num_lines}", documents, 3_400_000)


def _jsonl(argument: str) -> Corpus:
    """Each line of *.jsonl or *.jsonl.gz is an object whose FIELD is a document."""
    pattern, field = _split_argument(argument)
    files = find_files(pattern)

    def documents() -> Iterator[str]:
        for file in files:
            opened = gzip.open if file.suffix == ".gz" else open
            with reading(file), opened(file, "rb") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _json_field(line, field, f"{file}:{number}")

    return Corpus(file_fingerprint(files, "jsonl", field), documents, _total_size(files))


def _json_field(line: bytes, field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error})", "Each line must be an object") from error
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UserError(
            f"{where} has no text in the field {field!r}", "Name the field: jsonl:GLOB#FIELD"
        )
    # JSON can spell half a surrogate pair, which UTF-8 cannot.
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _parquet(argument: str) -> Corpus:
    """Each row's COLUMN is a document."""
    pattern, column = _split_argument(argument)
    files = find_files(pattern)

    def documents() -> Iterator[str]:
        for file in files:
            yield from hub.parquet_column(file, column)

    return Corpus(file_fingerprint(files, "parquet", column), documents, _total_size(files))


def _hugging_face(argument: str) -> Corpus:
    """A data set of the Hugging Face hub."""
    name, column = _split_argument(argument)
    return Corpus(f"hf-{name}-{column}", lambda: hub.hugging_face(name, column))


def _tfds(argument: str) -> Corpus:
    """The training split of a data set of the TensorFlow Datasets catalogue."""
    name, feature = _split_argument(argument)
    return Corpus(f"tfds-{name}-{feature}", lambda: hub.tensorflow_datasets(name, feature))


@dataclass(frozen=True)
class Reader:
    """What opens the corpora of a prefix.

    Attributes:
        usage: how to write `data.corpus`. One that reads files of this machine says GLOB: a run may
            continue after they have moved.
        open: returns the corpus, given what follows the colon.
    """

    usage: str
    open: Callable[[str], Corpus]


# By prefix. shards.py opens ready tokens: they are not documents.
READERS = {
    "pystdlib": Reader("pystdlib", _pystdlib),
    "text": Reader("text:GLOB", _text),
    "jsonl": Reader("jsonl:GLOB#FIELD", _jsonl),
    "parquet": Reader("parquet:GLOB#COLUMN", _parquet),
    "tfds": Reader("tfds:NAME#FEATURE", _tfds),
    "hf": Reader("hf:OWNER/NAME#COLUMN", _hugging_face),
    "synthetic": Reader("synthetic", _synthetic),
}
