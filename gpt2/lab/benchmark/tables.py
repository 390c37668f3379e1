"""Format rows of results as a table."""

from collections.abc import Callable, Sequence
from typing import Any

from gpt2.utils.text import format_count

Row = dict[str, Any]  # name -> value, of a type that JSON supports


def _ratio(interval: Sequence[float]) -> str:
    middle, *ends = interval
    text = f"{middle:.2f}"
    if ends:
        text += " ({:.2f} to {:.2f})".format(*ends)
    return text


# For each column: its title, the name of the value that it shows, and a function that formats the
# value.
_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("part", "part", str),
    ("", "name", str),
    ("step", "step_seconds", lambda seconds: f"{1e3 * seconds:,.2f} ms"),
    ("tokens/s", "tokens_per_second", format_count),
    ("MFU", "mfu", lambda mfu: f"{100 * mfu:.1f} %"),
    ("memory", "peak_memory_bytes", lambda size: f"{size / 1e9:.2f} GB"),
    ("data wait", "data_wait_seconds", lambda wait: f"{1e3 * wait:.2f} ms"),
    ("time / ours (95 %)", "ratio", _ratio),
    ("attention", "attention", str),
)


def table(rows: Sequence[Row]) -> str:
    """Format rows as a text table, with a column for each value in `_COLUMNS` that a row has."""
    import pandas as pd  # the Python that runs peers may not have pandas

    found = pd.DataFrame(rows)
    columns = {}
    for title, name, write in _COLUMNS:
        if name in found and found[name].notna().any():
            texts = found[name].map(write, na_action="ignore")
            columns[title] = texts.fillna("")
    return pd.DataFrame(columns).to_string(index=False)
