"""Format numbers for human readers."""

import datetime
import math


def counted(number: int, noun: str) -> str:
    """Format a number with its noun: `1 device`, `2,048 devices`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def format_count(number: float) -> str:
    """Format a count or rate: 950, 9,500, 12.3k, 124.4M, 9B."""
    if abs(number) < 1e4:
        return f"{number:,.0f}"
    number = float(f"{number:.3e}")  # 999,950 is 1M, not 1000k
    power = min(int(math.log10(abs(number))) // 3, 5)
    return f"{number / 1000**power:.1f}".removesuffix(".0") + " kMBTP"[power]


def format_bytes(number: float) -> str:
    """Format a number of bytes in units of powers of 1024: 512 B, 3.4 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def format_duration(seconds: float) -> str:
    """Format a duration: 0:01:23, `1 day, 4:05:00`."""
    if not seconds < 1e13:  # infinite, NaN, or too large for a timedelta
        return "?"
    return str(datetime.timedelta(seconds=round(seconds)))


def format_seconds(seconds: float) -> str:
    """Format a short time with its unit: 430 us, 6.2 ms, 104 ms, 62 s."""
    unit = "s"
    for smaller in ("ms", "us"):
        if seconds < 1:
            seconds *= 1000
            unit = smaller
    digits = 0 if seconds >= 10 else 1
    return f"{seconds:,.{digits}f} {unit}"
