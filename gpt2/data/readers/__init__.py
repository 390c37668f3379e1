"""Readers of corpora, one for each prefix.

To add a prefix, write a function that opens its corpora in one of this folder's files, and add a
row to the table `READERS` of that file.
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
    usage = find_usage(spec)
    if not usage:
        raise UserError(
            f"data.corpus={spec!r} is not a corpus",
            f"Use one of these forms: {', '.join(READERS)}",
        )
    return READERS[usage](spec.partition(":")[2])


def find_usage(spec: str) -> str:
    """Return the key in `READERS`, such as `text:GLOB`, that fits `spec`.

    `spec` is a value of `data.corpus`. If no key fits, return an empty string.
    """
    prefix, _, argument = spec.partition(":")
    for usage in READERS:
        name, _, needed = usage.partition(":")
        if name == prefix and bool(needed) == bool(argument):
            return usage
    return ""


def reads_files(spec: str) -> bool:
    """Return whether `spec`, a value of `data.corpus`, contains the path of files.

    Such files may be moved, so that two paths can lead to the same text.
    """
    return ":GLOB" in find_usage(spec)
