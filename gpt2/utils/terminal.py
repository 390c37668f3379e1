"""Lines that fit a terminal. Elsewhere (a file, a pipe, a CI log) lines stay whole."""

import math
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence

# Where a cell may be broken: behind a space, within `a=b`, and behind a comma of no number. Paths
# stay whole, to be copied.
_BREAKS = re.compile(r"(?<=[\s=])|(?<=,)(?=\D)")


def on_terminal() -> bool:
    """Returns whether standard output is a terminal that can redraw its lines."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def columns() -> float:
    """Returns the width of the terminal in characters; infinity if output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf


def wrap(text: str, indent: str = "  ") -> str:
    """Breaks the lines of a text between words where they are wider than the terminal.

    Args:
        text: of one or more lines.
        indent: before what continues a line.
    """
    width = columns()
    return "\n".join(
        line
        if len(line) <= width
        else textwrap.fill(
            line,
            int(width),
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.split("\n")
    )


def wrap_command(words: Sequence[str], indent: str = "") -> str:
    """Returns a command for a shell, broken with backslashes where it is wider than the terminal.

    Args:
        words: of the command, not quoted yet.
        indent: before each line; what continues the command stands four columns further in.
    """
    lines = [indent]
    for word in map(shlex.quote, words):
        if len(lines[-1]) + len(word) + len(" \\") > columns() and lines[-1].strip():
            lines.append(f"{indent}    ")
        lines[-1] += word + " "
    return " \\\n".join(line.rstrip() for line in lines)


def align(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows as aligned columns. The first and the last are broken until all fit.

    Args:
        rows: of as many cells each, at least two.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = columns() - sum(widths[1:-1]) - 2 * (len(widths) - 1)
    if widths[0] + widths[-1] > room:
        least = max(len(part.rstrip()) for row in rows for part in _BREAKS.split(row[0]))
        first = min(widths[0], max(room - widths[-1], room // 2, least))
        rows = [[_break(row[0], first), *row[1:-1], _break(row[-1], room - first)] for row in rows]
    cells = [[cell.split("\n") for cell in row] for row in rows]
    widths = [
        max(len(line) for lines in column for line in lines) for column in zip(*cells, strict=True)
    ]
    text = []
    for row in cells:
        for i in range(max(map(len, row))):
            line = [lines[i] if i < len(lines) else "" for lines in row]
            padded = [part.ljust(width) for part, width in zip(line, widths, strict=True)]
            text.append("  ".join(padded).rstrip())
    return "\n".join(text)


def _break(cell: str, width: float) -> str:
    lines = [""]
    for part in _BREAKS.split(cell):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)
