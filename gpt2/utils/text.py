"""Numbers as text for people."""

import math

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
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    pairs = [(days, "d"), (hours, "h"), (minutes, "m"), (seconds, "s")]
    while len(pairs) > 1 and not pairs[0][0]:
        pairs.pop(0)
    (number, unit), *rest = pairs
    return f"{number}{unit}" + (f" {rest[0][0]:02d}{rest[0][1]}" if rest else "")
