"""Readers of corpora, one for each prefix.

To add a prefix, write a function, and add a row to the table `READERS` in a file of this folder.
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

# A prefix with the form of its argument -> the function that opens a corpus, given the argument.
READERS: dict[str, Callable[[str], Corpus]] = {
    **packaged_texts.READERS,
    **text_files.READERS,
    **pretokenized.READERS,
    **downloads.READERS,
    **python_function.READERS,
}


def open_corpus(spec: str) -> Corpus:
    """Return the corpus that `data.corpus` names. No text is encoded yet."""
    usage = find_usage(spec)
    if not usage:
        raise UserError(
            f"data.corpus={spec!r} is not a corpus",
            f"Use one of these forms: {', '.join(READERS)}",
        )
    return READERS[usage](spec.partition(":")[2])


def find_usage(spec: str) -> str:
    """Return the key in `READERS` that fits `data.corpus`, or an empty string if none does."""
    prefix, _, argument = spec.partition(":")
    for usage in READERS:
        name, _, needed = usage.partition(":")
        if name == prefix and bool(needed) == bool(argument):
            return usage
    return ""


def reads_files(spec: str) -> bool:
    """Return whether `data.corpus` contains a path to files, which the user may move."""
    return ":GLOB" in find_usage(spec)
