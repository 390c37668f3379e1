"""A user's function, `python:MODULE:FUNCTION`, that returns documents or batches."""

import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from gpt2.data.interfaces import Corpus
from gpt2.data.loading.user_batches import BatchFunction
from gpt2.data.preparing.text_corpus import TextCorpus
from gpt2.data.source_files import SourceFiles
from gpt2.errors import UserError
from gpt2.utils.code import hash_file
from gpt2.utils.files import reading


def _open_function(argument: str) -> Corpus:
    """Open the user's function that `argument`, `MODULE:FUNCTION`, names.

    A function with a parameter `split` returns batches. Any other function returns documents. If
    the module's file changes, documents are prepared again, and a run on batches cannot continue,
    because its batches may have changed.
    """
    module, _, name = argument.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    remedy = "Give python:MODULE:FUNCTION of a module in this folder or on PYTHONPATH"
    with reading(f"data.corpus=python:{argument}", remedy, "cannot be imported"):
        function = getattr(importlib.import_module(module), name)
        parameters = inspect.signature(function).parameters
    path = Path(sys.modules[module].__file__ or "")
    if "split" in parameters:
        return BatchFunction(f"python:{argument}", function, hash_file(path))
    source = SourceFiles(lambda: [path], "python", argument)

    def documents() -> Iterator[str]:
        error = UserError(
            f"python:{argument} does not return an iterable of str",
            "Yield one str for each document",
        )
        texts = function()
        if texts is None or isinstance(texts, str):  # a str would yield characters
            raise error
        for text in texts:
            if not isinstance(text, str):
                raise error
            yield text

    # `num_bytes` is left out, because the module's file has another size than the documents.
    return TextCorpus(source, documents)


READERS = {"python:MODULE:FUNCTION": _open_function}
