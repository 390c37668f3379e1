"""Lines that fit a terminal. Elsewhere (a file, a pipe, a CI log) lines stay whole."""

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence


def on_terminal() -> bool:
    """Returns whether standard output is a terminal that can redraw its lines."""
    return bool(sys.stdout and sys.stdout.isatty()) and os.environ.get("TERM") != "dumb"


def columns() -> int:
    """Returns the width of the terminal in characters, 10,000 if output goes elsewhere."""
    is_terminal = bool(sys.stdout and sys.stdout.isatty())
    return shutil.get_terminal_size().columns if is_terminal else 10_000


def wrap(text: str) -> str:
    """Breaks the lines of a text between words where they are wider than the terminal."""
    kept = dict(break_long_words=False, break_on_hyphens=False, replace_whitespace=False)
    return "\n".join(
        line
        if len(line) <= columns()
        else textwrap.fill(line, columns(), subsequent_indent="  ", **kept)
        for line in text.split("\n")
    )


def align(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows as aligned columns, cells folded where the terminal is narrower."""
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for _ in rows[0]:
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(width=columns(), color_system=None, markup=False, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
