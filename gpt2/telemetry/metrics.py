"""Metrics on disk: metrics.jsonl, TensorBoard event files and, when asked for, W&B.

`metrics.jsonl` is the record of the run: one JSON object per logged step, in order, each step
once, also after a kill and a resume. NaN or Inf is written as `null`, because JSON cannot express
it (pandas reads it back as NaN). TensorBoard and W&B get the value itself.
"""

import contextlib
import errno
import json
import math
import mmap
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpt2.errors import UserError, warn
from gpt2.telemetry.event_file import EventFile, Histogram, Writer


class MetricsWriter(Writer):
    """Writes a run's metrics. The values of one step make one line, even if several calls add them.

    A step's line goes to disk when a later step begins, or at `flush`, and is written again if
    more values come (a validation after a checkpoint). Lines for which the disk has no space wait.

    `resume_step` is that of the checkpoint from which the run continues, 0 for none: later lines
    are dropped, since the run produces them again, and so is an incomplete line. TensorBoard's
    event files lie under `workdir/tensorboard`; W&B shows `config` beside the run.
    """

    def __init__(
        self,
        workdir: Path | str,
        config: Mapping[str, Any],
        tensorboard: bool = True,
        wandb: bool = False,
        resume_step: int = 0,
    ):
        workdir = Path(workdir)
        self._others: list[Writer] = [_Wandb(workdir, config)] if wandb else []
        workdir.mkdir(parents=True, exist_ok=True)
        if tensorboard:
            self._others.append(EventFile(workdir / "tensorboard", resume_step))
        self._path = workdir / "metrics.jsonl"
        self._told = set[str]()  # what could not be written
        # The newest records, from the byte of the file on where they belong. The last one may grow.
        self._start, self._records = 0, list[dict[str, Any]]()
        for start, end, record in _backwards(self._path):
            if record["step"] <= resume_step:
                os.truncate(self._path, end)
                self._start, self._records = start, [record]
                break
        else:
            self._path.write_bytes(b"")
        self._file = os.open(self._path, os.O_RDWR)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds numbers by name to the line of `step`, which is not below the newest one."""
        newest = self._records[-1]["step"] if self._records else -1
        if step < newest:
            raise ValueError(f"metrics of step {step} after those of step {newest}")
        if step > newest:
            self._commit()
            self._records.append({"step": step})
        self._records[-1].update(metrics)
        self._hand_on("write", step, metrics)

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Hands histograms by name to TensorBoard and W&B; metrics.jsonl holds none."""
        self._hand_on("write_histograms", step, histograms)

    def flush(self, step: int) -> None:
        """Writes all values up to `step` to the disk itself: every checkpoint has its metrics."""
        if self._records and self._records[-1]["step"] <= step:
            self._commit()
        with self._goes_on(self._path):
            os.fsync(self._file)
        self._hand_on("flush", step)

    def close(self) -> None:
        """Writes what is left and closes the files."""
        self._commit()
        os.close(self._file)
        self._hand_on("close")

    def _hand_on(self, name: str, *arguments: Any) -> None:
        for writer in self._others:
            with self._goes_on(type(writer).__name__):
                getattr(writer, name)(*arguments)

    def _commit(self) -> None:
        """Writes the newest records in one call: only a kill inside it could tear a line."""
        lines = [_line(record) for record in self._records]
        data = b"".join(lines)
        with self._goes_on(self._path):
            if os.pwrite(self._file, data, self._start) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.truncate(self._file, self._start + len(data))
            self._start += len(b"".join(lines[:-1]))
            self._records = self._records[-1:]

    @contextlib.contextmanager
    def _goes_on(self, what: object) -> Iterator[None]:
        """Warns once that a file cannot be written."""
        try:
            yield
        except OSError as error:
            if str(what) not in self._told:
                warn(f"{what} cannot be written now ({error.strerror}); the run goes on")
            self._told.add(str(what))


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Returns one dict per logged step of a metrics.jsonl, oldest first; NaN and Inf are None."""
    return [record for _, _, record in _backwards(Path(path))][::-1]


def seconds_taken(path: Path | str, up_to: int) -> float:
    """Returns `perf/total_seconds` of the newest step up to `up_to` that a metrics.jsonl tells."""
    lines = (record for _, _, record in _backwards(Path(path)) if record["step"] <= up_to)
    known = (line["perf/total_seconds"] for line in lines if "perf/total_seconds" in line)
    return next(known, None) or 0.0


def _backwards(path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yields start, end and record of each line from the last one on, a torn or bad one skipped."""
    if not path.exists() or not path.stat().st_size:
        return
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        end = data.rfind(b"\n") + 1
        while end:
            start = data.rfind(b"\n", 0, end - 1) + 1
            try:
                record = json.loads(data[start:end])
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield start, end, record
            end = start


def _line(record: Mapping[str, Any]) -> bytes:
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(finite, allow_nan=False).encode() + b"\n"


def check_wandb() -> None:
    """Raises a UserError if W&B is not installed."""
    try:
        import wandb  # noqa: F401
    except ImportError:
        raise UserError(
            "logging.wandb needs the package wandb", "Run `pip install wandb`"
        ) from None


class _Wandb(Writer):
    """The W&B run of this workdir, started or continued; its identity is kept in `wandb/run_id`."""

    def __init__(self, workdir: Path, config: Mapping[str, Any]):
        check_wandb()
        import wandb

        identity = workdir / "wandb" / "run_id"
        identity.parent.mkdir(parents=True, exist_ok=True)
        if not identity.exists():
            identity.write_text(secrets.token_hex(8))
        try:
            # A resumed run repeats the steps since its checkpoint; W&B keeps the first of two
            # values for a step, which is the same value.
            self._run = wandb.init(
                project="gpt2",
                name=workdir.resolve().name,
                id=identity.read_text(),
                resume="allow",
                dir=str(workdir),
                config=dict(config),
            )
        except wandb.Error as error:
            what = f"W&B could not start ({str(error).strip().splitlines()[0]})"
            raise UserError(what, "Run `wandb login`, or set WANDB_MODE=offline") from None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        from wandb import Histogram as Shown

        pairs = {name: (each.counts, each.edges) for name, each in histograms.items()}
        shown = {name: Shown(np_histogram=pair) for name, pair in pairs.items()}
        self._run.log(shown, step=step)

    def close(self) -> None:
        self._run.finish()
