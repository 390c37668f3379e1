"""Format numbers for the cells of tables, and print tables on the screen."""

import math
from collections.abc import Collection
from statistics import mean, stdev

import pandas as pd
from rich.console import Console
from rich.table import Table


def spread(values: Collection[float]) -> str:
    """Format the mean and the standard deviation of `values`, such as `3.2104 ± 0.0123`.

    Both numbers have four decimals. If one of them is at least 100, both have fewer decimals, so
    that the larger number has five digits. A single value has no standard deviation, and is
    formatted alone. Without values, return `-`.
    """
    if not len(values):
        return "-"
    middle = mean(values)
    deviation = stdev(values) if len(values) > 1 else 0.0
    largest = max(abs(middle), deviation, 1.0)
    decimals = 4
    if largest >= 100:
        decimals = max(0, 4 - int(math.log10(largest)))  # five digits
    text = f"{middle:,.{decimals}f}"
    if len(values) > 1:
        text += f" ± {deviation:,.{decimals}f}"
    return text


def number(value: float, form: str) -> str:
    """Format a number with `form`, such as `.4f`. Return `-` if the number is not finite."""
    if math.isfinite(value):
        return f"{value:{form}}"
    return "-"


def interval(low: float, high: float, form: str) -> str:
    """Format an interval as `(LOW to HIGH)`, with the format `form`, such as `.4f`, for each end.

    Return "" if an end is not finite.
    """
    if math.isfinite(high - low):
        return f"({low:{form}} to {high:{form}})"
    return ""


_WHOLE = ("difference", "interval")  # columns whose cells are not wrapped


def print_table(table: pd.DataFrame) -> None:
    """Print a table of strings in 80 columns."""
    screen = Table(box=None, pad_edge=False)
    for title in table.columns:
        screen.add_column(title, no_wrap=title in _WHOLE, overflow="fold")
    for row in table.itertuples(index=False):
        screen.add_row(*row)
    Console(width=80, markup=False, highlight=False).print(screen)
