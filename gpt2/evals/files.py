"""The files of tasks, which others have made: opened and read here alone."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gpt2.utils import files

Example = TypeVar("Example")
reading = partial(files.reading, how="docs/evaluation.md says what the file holds")


def read_text(path: Path) -> str:
    """Reads UTF-8, with or without a byte order mark."""
    with reading(path):
        return path.read_text(encoding="utf-8-sig")


def read_jsonl(path: Path, parse: Callable[[Any], Example]) -> list[Example]:
    """Reads a JSON value a line, and what `parse` makes of it. Whatever it raises is told."""
    examples = []
    for number, line in enumerate(read_text(path).rstrip("\n").split("\n"), 1):
        with reading(f"{path}, line {number}"):
            examples.append(parse(json.loads(line)))
    return examples
