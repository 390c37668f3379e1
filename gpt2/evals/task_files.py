"""Read the files of tasks, and report errors in them with file and line."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gpt2.utils import files

Example = TypeVar("Example")
reading = partial(
    files.reading, remedy="docs/evaluation.md describes the contents of the file"
)


def require(condition: object, message: str) -> None:
    """Raise a ValueError with `message` unless `condition` is true.

    Call this in the body of `with reading(...)`, which adds the name of the file to the message.
    """
    if not condition:
        raise ValueError(message)


def read_text(path: Path) -> str:
    """Read a UTF-8 text, with or without a byte order mark. An empty file is an error."""
    with reading(path):
        text = path.read_text(encoding="utf-8-sig")
        # A failed download may leave an empty file, whose score would be 0 / 0.
        require(text.strip(), "the file is empty")
    return text


def read_jsonl(path: Path, parse: Callable[[Any], Example]) -> list[Example]:
    """Return `parse(value)` for the JSON value in each line of a file.

    An error of `parse` becomes a UserError that names the file and the line.
    """
    examples = []
    for number, line in enumerate(read_text(path).rstrip("\n").split("\n"), 1):
        with reading(f"{path}, line {number}"):
            examples.append(parse(json.loads(line)))
    return examples
