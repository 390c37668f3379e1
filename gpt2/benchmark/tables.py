"""Rows of results as a table for people, in a terminal or a Markdown page."""

from collections.abc import Callable, Sequence
from typing import Any

from gpt2.utils.text import format_count

Row = dict[str, Any]


def _ratio(row: Row) -> str:
    if row["name"] == "jax":
        return ""
    middle, *interval = row["ratio"]
    return f"{middle:.2f}" + (
        " ({:.2f} to {:.2f})".format(*interval) if interval else ""
    )


def _number(
    text: str, name: str, factor: float = 1.0
) -> tuple[str, Callable[[Row], str]]:
    return name, lambda row: text.format(factor * row[name])


# A column's title, the figure that a row must have, and what the row writes there.
_COLUMNS: dict[str, tuple[str, Callable[[Row], str]]] = {
    "part": ("part", lambda row: row["part"]),
    "": ("name", lambda row: row["name"]),
    "step": _number("{:,.2f} ms", "step_seconds", 1e3),
    "least": ("turns", lambda row: f"{1e3 * min(row['turns']):,.2f}"),
    "most": ("turns", lambda row: f"{1e3 * max(row['turns']):,.2f}"),
    "tokens/s": (
        "tokens_per_second",
        lambda row: format_count(row["tokens_per_second"]),
    ),
    "MFU": _number("{:.1f} %", "mfu", 100),
    "memory": _number("{:.2f} GB", "peak_bytes", 1e-9),
    "compiled in": _number("{:.1f} s", "compile_seconds"),
    "waits for data": _number("{:.2f} ms", "data_wait_seconds", 1e3),
    "jax is faster by (95 %)": ("ratio", _ratio),
    "attention": ("attention", lambda row: row["attention"]),
    "check": ("check", lambda row: row["check"]),
    "passed": ("passed", lambda row: "yes" if row["passed"] else "NO"),
    "error over the reference's": _number("{:.2f}", "worst"),
    "what happened": ("error", lambda row: row["error"]),
}


def table(rows: Sequence[Row]) -> str:
    """Returns rows as a Markdown table with aligned columns, of those that some row fills."""
    columns = []
    for title, (name, write) in _COLUMNS.items():
        texts = [
            write(row).replace("|", "/") if row.get(name) is not None else ""
            for row in rows
        ]
        if any(texts):
            width = max(map(len, (title, *texts)))
            columns.append([text.ljust(width) for text in (title, "-" * width, *texts)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in zip(*columns, strict=True))
