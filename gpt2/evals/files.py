"""The files of tasks, which others have made: opened and read here alone."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from gpt2.errors import UserError
from gpt2.utils import files

Example = TypeVar("Example")
_HOW = "docs/evaluation.md says what the file holds"
reading = partial(files.reading, how=_HOW)


def read_text(path: Path) -> str:
    """Reads UTF-8, with or without a byte order mark."""
    with reading(path):
        return path.read_text(encoding="utf-8-sig")


def read_jsonl(path: Path, parse: Callable[[object], Example | None]) -> list[Example]:
    """Reads a JSON value a line. `parse` returns the example, or None if the value holds none."""
    examples = []
    for number, line in enumerate(read_text(path).rstrip("\n").split("\n"), 1):
        with reading(f"{path}, line {number}"):
            example = parse(json.loads(line))
            if example is None:
                what = f"{path}, line {number} lacks a part, or a known answer"
                raise UserError(what, _HOW)
            examples.append(example)
    return examples
