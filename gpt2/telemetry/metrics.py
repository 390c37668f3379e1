"""Metrics on disk: metrics.jsonl, TensorBoard event files and, when asked for, W&B.

`metrics.jsonl` is the record of the run: one JSON object per logged step, in order, each step
once, also after a kill and a resume. A value that is not finite is written as `null`, because JSON
cannot express it (pandas reads it back as NaN). TensorBoard and W&B get the value itself.
"""

import bisect
import contextlib
import errno
import itertools
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpt2.errors import UserError, warn
from gpt2.telemetry.event_file import EventFile, Histogram
from gpt2.utils import files
from gpt2.utils.files import write_bytes, write_text
from gpt2.utils.text import counted


class MetricsWriter:
    """Writes a run's metrics. The values of one step make one line, even if several calls add them.

    A step's line goes to disk when a later step begins, or at `flush`. Values for the newest step
    may still come after that (a validation following a checkpoint). Its line is then replaced.

    Args:
        workdir: the run's directory; created if missing.
        config: the resolved config, which W&B shows beside the run.
        tensorboard: also write event files under `workdir/tensorboard`.
        wandb: also log to Weights & Biases; `WANDB_MODE=offline` is honoured.
        resume_step: the step of the checkpoint from which the run continues, 0 for none. Later
            lines are dropped, since the run produces them again, and so is an incomplete line.

    Raises:
        UserError: W&B cannot start.
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
        self._path = workdir / "metrics.jsonl"
        self._wandb = _start_wandb(workdir, config) if wandb else None
        self._folder = workdir / "tensorboard"
        self._events = EventFile(self._folder, resume_step) if tensorboard else None
        workdir.mkdir(parents=True, exist_ok=True)
        records = _records(self._path, up_to=resume_step)
        log_every = config.get("train", {}).get("log_every", 1)
        _tell_of_damage(self._path, records, resume_step, log_every)
        self._replace(records)
        self._step = records[-1]["step"] if records else -1
        self._record = records[-1] if records else {}
        self._pending = False  # does `_record` hold values that the file lacks?
        self._on_disk = bool(records)  # does the file have a line for `_step`?
        self._unwritten: list[dict[str, Any]] = []  # lines for which the disk had no room
        self._replaces = False  # does one of them replace a line of the file?
        self._told = set[Path]()  # files that could not be written

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds values to the line of `step`.

        Args:
            step: not below the newest step written.
            metrics: Python numbers by name, such as `{"train/loss": 3.2, "tokens": 4096}`.

        Raises:
            ValueError: `step` is older than the newest line.
        """
        if step < self._step:
            raise ValueError(f"metrics of step {step} after those of step {self._step}")
        if step > self._step:
            self._commit()
            self._step, self._record, self._on_disk = step, {"step": step}, False
        self._record.update(metrics)
        self._pending = True
        if self._events:
            with self._going_on(self._folder):
                self._events.add(step, metrics)
        if self._wandb:
            self._wandb.log(dict(metrics), step=step)

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Hands histograms by name to TensorBoard and W&B; metrics.jsonl holds none."""
        if self._events:
            with self._going_on(self._folder):
                self._events.add_histograms(step, histograms)
        if self._wandb:
            import wandb

            pairs: dict[str, Any] = {n: (each.counts, each.edges) for n, each in histograms.items()}
            shown = {name: wandb.Histogram(np_histogram=pair) for name, pair in pairs.items()}
            self._wandb.log(shown, step=step)

    def say(self, text: str) -> None:
        """Does nothing: the screen shows it."""

    def flush(self, step: int) -> None:
        """Writes all values up to `step` to the disk itself, past the caches of the system.

        Call it before a checkpoint of `step` is complete, so that every checkpoint has its metrics.
        """
        if self._step <= step:
            self._commit()
        with self._going_on(self._path), open(self._path, "a") as file:
            os.fsync(file.fileno())
        if self._events:
            with self._going_on(self._folder):
                self._events.flush()

    def close(self) -> None:
        """Writes what is left and closes the files."""
        self.flush(self._step)
        if self._events:
            with self._going_on(self._folder):
                self._events.close()
        if self._unwritten:
            warn(f"{self._path} lacks {counted(len(self._unwritten), 'line')}, for want of room")
        if self._wandb:
            self._wandb.finish()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _commit(self) -> None:
        if self._pending:
            self._unwritten.append(dict(self._record))
            self._replaces |= self._on_disk
            self._pending, self._on_disk = False, True
        if not self._unwritten:
            return
        with self._going_on(self._path):
            if self._replaces:
                last = {record["step"]: record for record in self._unwritten}  # its newest form
                earlier = _records(self._path, up_to=min(last) - 1)
                self._replace([*earlier, *last.values()])
            else:
                self._append(self._unwritten)
            self._unwritten, self._replaces = [], False

    def _append(self, records: list[dict]) -> None:
        """Appends lines in one write call: only a kill inside it could tear one."""
        with open(self._path, "ab", buffering=0) as file:
            size, data = file.tell(), b"".join(map(_line, records))
            try:
                if file.write(data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(size)
                raise

    @contextlib.contextmanager
    def _going_on(self, path: Path) -> Iterator[None]:
        """Tells once that a file cannot be written. Lines of metrics.jsonl are tried again."""
        try:
            yield
        except OSError as error:
            if path not in self._told:
                warn(f"{path} cannot be written now ({error.strerror}); the run goes on")
            self._told.add(path)

    def _replace(self, records: list[dict]) -> None:
        """Replaces all of metrics.jsonl."""
        write_bytes(self._path, map(_line, records))


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Reads a metrics.jsonl, leaving out damaged lines, and a last one that is being written.

    Returns:
        One dict per logged step, oldest first; a value that was not finite is None.
    """
    return _records(Path(path))


def seconds_taken(path: Path | str, up_to: int) -> float:
    """Returns `perf/total_seconds` of the newest step up to `up_to` that a metrics.jsonl tells."""
    lines = _records(Path(path), up_to)
    known = [line.get("perf/total_seconds") for line in lines]
    return next((seconds for seconds in reversed(known) if isinstance(seconds, float)), 0.0)


def _records(path: Path, up_to: float = math.inf) -> list[dict[str, Any]]:
    """Returns the whole lines of a metrics.jsonl whose step is at most `up_to`, in order."""
    records = [record for line in _whole_lines(path) if (record := _read_line(line))]
    return [record for record in _in_order(records) if record["step"] <= up_to]


def _in_order(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns as many records as possible whose steps ascend: a damaged step costs its own line.

    This is the longest increasing subsequence (Fredman 1975), which ends in `last[-1]`.
    """
    steps = [record["step"] for record in records]
    if all(first < second for first, second in itertools.pairwise(steps)):
        return records
    ends, last, before = list[int](), list[int](), list[int]()
    for i, step in enumerate(steps):
        length = bisect.bisect_left(ends, step)
        ends[length : length + 1], last[length : length + 1] = [step], [i]
        before.append(last[length - 1] if length else -1)
    chosen, i = [], last[-1]
    while i >= 0:
        chosen.append(records[i])
        i = before[i]
    return chosen[::-1]


def _whole_lines(path: Path) -> Iterator[bytes]:
    if not path.exists():
        return
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


def _read_line(line: bytes) -> dict[str, Any] | None:
    """Returns the values of a line, or None if it is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    whole = all(type(value) in (int, float, type(None)) for value in record.values())
    return record if whole else None


def _tell_of_damage(
    path: Path, records: list[dict[str, Any]], resume_step: int, log_every: int
) -> None:
    """Names what a run that continues finds missing in its metrics. Keeps a damaged file."""
    if damaged := sum(1 for _ in _whole_lines(path)) - len(_records(path)):
        copy = files.unused(path.with_name(f"{path.name}.damaged"))
        shutil.copy(path, copy)
        warn(f"{counted(damaged, 'line')} of {path} cannot be read and are left out; see {copy}")
    last, *earlier = [record["step"] for record in reversed(records[-2:])] or [0]
    spacing = max(log_every, *(last - step for step in earlier), 1)  # which may have changed
    if last + spacing <= resume_step:
        warn(f"{path} lacks what was logged between step {last} and step {resume_step}")


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
            "logging.wandb=True needs the package wandb",
            "Run `pip install wandb`, or use --config.logging.wandb=False",
        ) from None


def _start_wandb(workdir: Path, config: Mapping[str, Any]):
    """Starts, or continues, the W&B run of this workdir; its identity is kept in `wandb/run_id`."""
    check_wandb()
    import wandb

    directory = workdir / "wandb"
    directory.mkdir(parents=True, exist_ok=True)
    identity = directory / "run_id"
    if not identity.exists():
        write_text(identity, secrets.token_hex(8))
    try:
        # A resumed run repeats the steps since its checkpoint; W&B keeps the first of two values
        # for a step, which is the same value.
        return wandb.init(
            project="gpt2",
            name=workdir.resolve().name,
            id=identity.read_text(),
            resume="allow",
            dir=str(workdir),
            config=dict(config),
        )
    except wandb.Error as error:
        raise UserError(
            f"W&B could not start ({str(error).strip().splitlines()[0]})",
            "Run `wandb login`, or set WANDB_MODE=offline in the environment",
        ) from None
