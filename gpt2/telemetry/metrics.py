"""metrics.jsonl, the record of a run: one JSON object per logged step, in order, each step once.

That holds after a kill and a resume, too. NaN or Inf is `null`, because JSON cannot express it.
"""

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

from gpt2.telemetry.writers import Metrics, Writer


class MetricsFile(Writer):
    """Writes metrics.jsonl. The values of one step make one line, even if several calls add them.

    A line goes to disk when a later step begins, or at `flush`. Where the disk is full, an OSError,
    lines wait. Lines after `resume_step`, which a continued run produces again, are dropped, and
    torn ones.
    """

    def __init__(self, path: Path, resume_step: int = 0):
        self._newest: float = 0  # step, on disk or waiting
        self._end = 0  # byte
        for end, record in _read(path):
            if record["step"] <= resume_step:
                self._newest = record["step"]
                self._end = end
        self._waiting = list[dict[str, float]]()
        flags = os.O_RDWR | os.O_CREAT
        self._file = os.open(path, flags, 0o666)
        os.truncate(self._file, self._end)

    def write(self, step: int, metrics: Metrics) -> None:
        """Adds numbers by name to the line of `step`, which is the newest one or a new one."""
        if step > self._newest:
            self._newest = step
            self._waiting.append({"step": step})
        elif step < self._newest or not self._waiting:
            raise ValueError(
                f"metrics of step {step} after those of step {self._newest}"
            )
        self._waiting[-1].update(metrics)
        self._commit(step - 1)

    def flush(self, step: int) -> None:
        """Writes all values up to `step` to the disk itself: every checkpoint has its metrics."""
        self._commit(step)
        os.fsync(self._file)

    def close(self) -> None:
        """Writes what is left and closes the file."""
        try:
            self._commit(math.inf)
        finally:
            os.close(self._file)

    def _commit(self, last: float) -> None:
        """Writes records up to a step in one call: only a kill inside it could tear a line."""
        records = [record for record in self._waiting if record["step"] <= last]
        if not records:
            return
        data = b"".join(map(_to_line, records))
        written = os.pwrite(self._file, data, self._end)
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._end += len(data)
        del self._waiting[: len(records)]


def _to_line(record: Metrics) -> bytes:
    finite = dict[str, float | None](record)
    for name, value in record.items():
        if not math.isfinite(value):
            finite[name] = None
    return json.dumps(finite).encode() + b"\n"


def read_metrics(path: Path | str) -> list[dict]:
    """Returns one dict per logged step of a metrics.jsonl, oldest first; NaN and Inf are None."""
    return [record for _, record in _read(Path(path))]


def _read(path: Path) -> Iterator[tuple[int, dict]]:
    """Yields the end and the record of each line, oldest first; a torn or bad one is skipped."""
    if not path.exists():
        return
    end = 0
    for line in path.read_bytes().splitlines(keepends=True):
        end += len(line)
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if line.endswith(b"\n"):
                yield end, record
