"""Read the files of tasks, which other people have made."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gpt2.utils import files

Example = TypeVar("Example")
reading = partial(
    files.reading, remedy="See docs/evaluation.md for what the file holds"
)


def require(condition: object, message: str) -> None:
    """Raise a ValueError unless a condition holds; `reading` adds the file to its message."""
    if not condition:
        raise ValueError(message)


def read_text(path: Path) -> str:
    """Read UTF-8, with or without a byte order mark."""
    with reading(path):
        text = path.read_text(encoding="utf-8-sig")
        # A download that failed leaves an empty file, whose score would be 0 / 0.
        require(text.strip(), "the file is empty")
    return text


def read_jsonl(path: Path, parse: Callable[[Any], Example]) -> list[Example]:
    """Read one JSON value from each line, and return what `parse` makes of each."""
    examples = []
    for number, line in enumerate(read_text(path).rstrip("\n").split("\n"), 1):
        with reading(f"{path}, line {number}"):
            examples.append(parse(json.loads(line)))
    return examples
