"""Rows of results as a table for people, in a terminal or a Markdown page."""

from collections.abc import Callable, Sequence
from typing import Any

from gpt2.utils.text import format_count

Row = dict[str, Any]  # figures by name, as JSON has them


def _ratio(row: Row) -> str:
    if row["name"] == "jax":
        return ""
    middle, *interval = row["ratio"]
    text = f"{middle:.2f}"
    if interval:
        text += " ({:.2f} to {:.2f})".format(*interval)
    return text


# A column's title, the figure that a row must have, and what the row writes there.
_COLUMNS: tuple[tuple[str, str, Callable[[Row], str]], ...] = (
    ("part", "part", lambda row: row["part"]),
    ("", "name", lambda row: row["name"]),
    ("step", "step_seconds", lambda row: f"{1e3 * row['step_seconds']:,.2f} ms"),
    (
        "tokens/s",
        "tokens_per_second",
        lambda row: format_count(row["tokens_per_second"]),
    ),
    ("MFU", "mfu", lambda row: f"{100 * row['mfu']:.1f} %"),
    (
        "memory",
        "peak_memory_bytes",
        lambda row: f"{row['peak_memory_bytes'] / 1e9:.2f} GB",
    ),
    (
        "waits for data",
        "data_wait_seconds",
        lambda row: f"{1e3 * row['data_wait_seconds']:.2f} ms",
    ),
    ("jax is faster by (95 %)", "ratio", _ratio),
    ("attention", "attention", lambda row: row["attention"]),
)


def table(rows: Sequence[Row]) -> str:
    """Returns rows as a Markdown table with aligned columns, of those that some row fills."""
    columns = []
    for title, name, write in _COLUMNS:
        texts = []
        for row in rows:
            text = "" if row.get(name) is None else write(row)
            texts.append(text.replace("|", "/"))
        if any(texts):
            width = max(map(len, [title, *texts]))
            cells = [title, "-" * width, *texts]
            columns.append([cell.ljust(width) for cell in cells])
    lines = zip(*columns, strict=True)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
