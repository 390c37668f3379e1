"""Write and read metrics.jsonl, a file with one JSON object for each logged step.

The steps are in order, and no step occurs twice, even after a run was killed and continued. NaN and
Inf are written as `null`, because JSON has neither.
"""

import errno
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

from gpt2.errors import warn
from gpt2.telemetry.writers import Metrics, Writer
from gpt2.utils.text import counted


class MetricsFile(Writer):
    """The writer of metrics.jsonl, which collects all values of a step in one line.

    A line is written to the file when the first value of a later step arrives, at `flush` or at
    `close`. If the disk is full, these methods raise OSError, and retain the lines for the next
    attempt. The constructor removes the lines of steps after `resume_step` from the file at `path`,
    because a continued run writes them again. It also removes a line that is incomplete because the
    run was killed. The last line that remains is written again with the values that are added to
    its step.
    """

    name = "metrics.jsonl"

    def __init__(self, path: Path, resume_step: int = 0):
        self._newest: float = 0  # newest step, written or waiting to be written
        self._waiting = list[dict[str, float]]()
        self._end = 0  # offset in bytes at which the waiting lines will be written
        newest_end = 0
        for end, record in _read(path):
            if record["step"] <= resume_step:
                self._newest = record["step"]
                self._waiting = [record]
                self._end, newest_end = newest_end, end
        flags = os.O_RDWR | os.O_CREAT
        self._file = os.open(path, flags, 0o666)
        os.truncate(self._file, newest_end)

    def write(self, step: int, metrics: Metrics) -> None:
        """Add values to the line of `step`, which must not be earlier than the newest step."""
        if step > self._newest:
            self._newest = step
            self._waiting.append({"step": step})
        elif step < self._newest or not self._waiting:
            raise ValueError(
                f"metrics of step {step} cannot be added, because step {self._newest} "
                "is already written"
            )
        self._waiting[-1].update(metrics)
        self._commit(step - 1)

    def flush(self, step: int) -> None:
        """Write the lines of all steps up to `step`, and flush the file to the disk.

        A run calls this before it saves a checkpoint, so that no line before the checkpoint is
        lost.
        """
        self._commit(step)
        os.fsync(self._file)

    def close(self) -> None:
        """Write the remaining lines and close the file."""
        try:
            self._commit(math.inf)
        finally:
            os.close(self._file)

    def _commit(self, last: float) -> None:
        """Write the waiting records of steps up to `last`.

        A single system call writes all of them, so that a line is incomplete only if the process is
        killed during the call, or if the disk is full.
        """
        records = [record for record in self._waiting if record["step"] <= last]
        if not records:
            return
        data = b"".join(map(_to_line, records))
        written = os.pwrite(self._file, data, self._end)
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._end += len(data)
        # A line that is written again may be shorter than before.
        os.truncate(self._file, self._end)
        del self._waiting[: len(records)]


def _to_line(record: Metrics) -> bytes:
    finite = dict[str, float | None](record)
    for name, value in record.items():
        if value is not None and not math.isfinite(value):
            finite[name] = None
    return json.dumps(finite).encode() + b"\n"


def read_metrics(path: Path | str) -> list[dict]:
    """Return the records of a metrics.jsonl, one for each logged step, oldest first.

    NaN and Inf are None.
    """
    return [record for _, record in _read(Path(path))]


def _read(path: Path) -> Iterator[tuple[int, dict]]:
    """Yield the record of each line, with the offset in bytes at which the line ends.

    The oldest line is first. A last line that is incomplete because the run was killed is skipped.
    Other lines that are not records are skipped with one warning.
    """
    if not path.exists():
        return
    end = 0
    bad_lines = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        end += len(line)
        record = _parse(line)
        if record is not None and line.endswith(b"\n"):
            yield end, record
        elif record is None and line.endswith(b"\n"):
            bad_lines.append(number)
    if bad_lines:
        warn(
            f"{path}: skipping {counted(len(bad_lines), 'line')} without a metrics record; the "
            f"first is line {bad_lines[0]}"
        )


def _parse(line: bytes) -> dict | None:
    """Return the record in a line of JSON, or None if the line is not a record.

    A record is an object that contains `step`, and whose values are all numbers or null.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # deeply nested JSON exhausts the stack
        return None
    if not isinstance(record, dict) or record.get("step") is None:
        return None
    for value in record.values():
        if not (value is None or isinstance(value, int | float)):
            return None
    return record
