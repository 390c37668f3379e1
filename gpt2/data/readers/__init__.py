"""Readers of corpora, one for each prefix.

To add a prefix, write a function that opens its corpora in one of this folder's files, and add a
row to the table `READERS` of that file. If the file is new, add its table to `READERS` below.
"""

from collections.abc import Callable

from gpt2.data.interfaces import Corpus
from gpt2.data.readers import (
    downloads,
    packaged_texts,
    pretokenized,
    python_function,
    text_files,
)
from gpt2.errors import UserError

# The form of a value of `data.corpus`, such as `text:GLOB` -> the function that opens the corpus.
# The argument of the function is the part of the value after the first colon.
READERS: dict[str, Callable[[str], Corpus]] = {
    **packaged_texts.READERS,
    **text_files.READERS,
    **pretokenized.READERS,
    **downloads.READERS,
    **python_function.READERS,
}


def open_corpus(spec: str) -> Corpus:
    """Return the corpus for `spec`, a value of `data.corpus`. No text is encoded yet."""
    prefix, _, argument = spec.partition(":")
    for usage, read in READERS.items():
        name, _, needed = usage.partition(":")
        if name == prefix and bool(needed) == bool(argument):
            return read(argument)
    raise UserError(
        f"data.corpus={spec!r} is not a corpus",
        f"Use one of these forms: {', '.join(READERS)}",
    )


def reads_files(spec: str) -> bool:
    """Return whether `spec`, a value of `data.corpus`, contains the path of files.

    Such files may be moved, so that two paths can lead to the same text.
    """
    return spec.startswith(("text:", "jsonl:", "parquet:", "tokens:"))
