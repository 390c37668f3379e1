"""Readers of corpora, by prefix. A new prefix is a function and a row in a file of this folder."""

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

# The usage of each prefix, and the function that opens what follows the prefix.
READERS: dict[str, Callable[[str], Corpus]] = {
    **packaged_texts.READERS,
    **text_files.READERS,
    **pretokenized.READERS,
    **downloads.READERS,
    **python_function.READERS,
}


def open_corpus(spec: str) -> Corpus:
    """Return the corpus that `data.corpus` names. No text is read yet."""
    usage = find_usage(spec)
    if not usage:
        raise UserError(
            f"data.corpus={spec!r} names no corpus",
            f"Write one of: {', '.join(READERS)}",
        )
    return READERS[usage](spec.partition(":")[2])


def find_usage(spec: str) -> str:
    """Return the usage of the prefix of `data.corpus`, or an empty text if there is none."""
    prefix, _, argument = spec.partition(":")
    for usage in READERS:
        name, _, needed = usage.partition(":")
        if name == prefix and bool(needed) == bool(argument):
            return usage
    return ""


def reads_files(spec: str) -> bool:
    """Return whether `data.corpus` names files by their path, which may move."""
    return ":GLOB" in find_usage(spec)
