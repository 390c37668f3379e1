"""Rows of results as a table for people, in a terminal or a Markdown page."""

from collections.abc import Callable, Sequence
from typing import Any

from gpt2.utils.text import format_count

Row = dict[str, Any]  # figures by name, as JSON has them


def _ratio(interval: Sequence[float]) -> str:
    middle, *ends = interval
    text = f"{middle:.2f}"
    if ends:
        text += " ({:.2f} to {:.2f})".format(*ends)
    return text


# A column's title, the figure that it has of a row, and how that is written.
_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("part", "part", str),
    ("", "name", str),
    ("step", "step_seconds", lambda seconds: f"{1e3 * seconds:,.2f} ms"),
    ("tokens/s", "tokens_per_second", format_count),
    ("MFU", "mfu", lambda share: f"{100 * share:.1f} %"),
    ("memory", "peak_memory_bytes", lambda size: f"{size / 1e9:.2f} GB"),
    ("waits for data", "data_wait_seconds", lambda wait: f"{1e3 * wait:.2f} ms"),
    ("jax is faster by (95 %)", "ratio", _ratio),
    ("attention", "attention", str),
)


def table(rows: Sequence[Row]) -> str:
    """Returns rows as a Markdown table with aligned columns, of those that some row fills."""
    columns = []
    for title, name, write in _COLUMNS:
        texts = []
        for row in rows:
            text = "" if row.get(name) is None else write(row[name])
            texts.append(text.replace("|", "/"))
        if any(texts):
            width = max(map(len, [title, *texts]))
            cells = [title, "-" * width, *texts]
            columns.append([cell.ljust(width) for cell in cells])
    lines = zip(*columns, strict=True)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
