"""Numbers and tables as text for people."""

import math
import os
import shutil
import sys
from collections.abc import Sequence

_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def counted(number: int, noun: str) -> str:
    """Writes a number with its noun: `1 device`, `2,048 devices`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def format_count(number: float) -> str:
    """Writes a count: 950, 9,500, 12.3k, 124.4M, 9B."""
    return format_rate(number).replace(".0", "")


def format_rate(number: float) -> str:
    """Writes what was measured, a zero behind the point too: 950, 9,500, 12.3k, 31.0k."""
    if abs(number) < 1e4:
        return f"{number:,.0f}"
    size, unit = next(pair for pair in _UNITS if abs(number) >= pair[0])
    return f"{number / size:.1f}{unit}"


def format_bytes(number: float) -> str:
    """Writes a size in binary units: 512 B, 3.4 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def format_duration(seconds: float) -> str:
    """Writes a duration in its two leading units: 42s, 1m 23s, 2h 05m, 3d 04h."""
    if not math.isfinite(seconds):
        return "?"
    seconds = round(seconds)
    for size, unit, part_size, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit} {seconds % size // part_size:02d}{part}"
    return f"{seconds // 60}m {seconds % 60:02d}s" if seconds >= 60 else f"{seconds}s"


def on_terminal() -> bool:
    """Returns whether standard output is a terminal that can redraw its lines."""
    return bool(sys.stdout and sys.stdout.isatty()) and os.environ.get("TERM") != "dumb"


def align(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows as aligned columns, cells folded where a terminal is narrower."""
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for _ in rows[0]:
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    width = shutil.get_terminal_size().columns if on_terminal() else 10_000
    console = Console(width=width, color_system=None, markup=False, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
