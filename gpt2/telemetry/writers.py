"""What takes a run's metrics: what every writer offers, TensorBoard's event file, and W&B."""

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpt2.errors import UserError

NUM_BUCKETS = 32  # TensorBoard draws 30


class Histogram(NamedTuple):
    """How many values of a tensor lie in each of `NUM_BUCKETS` buckets of equal width."""

    low: Any  # the least value
    high: Any
    counts: Any  # [NUM_BUCKETS] int32

    @property
    def edges(self) -> np.ndarray:
        """The ends of the buckets, one more than there are buckets."""
        return np.linspace(float(self.low), float(self.high), NUM_BUCKETS + 1)


class Writer:
    """Takes the metrics of a run. A writer of one's own overrides a part.

    An OSError is told once, and ends no run.
    """

    def step(self, step: int) -> None:
        """Hears that a step is done, with metrics or not."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds metrics of a step, by name."""

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Adds histograms of a step, by name."""

    def say(self, text: str) -> None:
        """Tells a person something, in a line."""

    def flush(self, step: int) -> None:
        """Puts all metrics up to `step` on disk."""

    def close(self) -> None:
        """Writes what is left."""


class EventFile(Writer):
    """Scalars and histograms in a TensorBoard event file.

    A full disk would end the thread of tensorboardX's SummaryWriter, and block the run.
    """

    def __init__(self, directory: Path, resume_step: int):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names, which count whole seconds. A file of
        # the same name would be replaced.
        self._file = EventsWriter(str(directory / "events"), filename_suffix=f".{time.time_ns()}")
        # TensorBoard then forgets what a killed run wrote from this step on.
        self._add(resume_step + 1, session_log=SessionLog(status=SessionLog.START))

    def _add(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._file.write_event(Event(step=step, wall_time=time.time(), **content))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes scalars by name."""
        from tensorboardX.summary import scalar

        for name, value in metrics.items():
            self._add(step, summary=scalar(name, value))

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Writes histograms by name; their sums are of the buckets' middles."""
        from tensorboardX.summary import histogram_raw

        for name, each in histograms.items():
            ends, counts = each.edges, np.asarray(each.counts)
            sums = [float(counts @ ((ends[1:] + ends[:-1]) / 2) ** power) for power in (0, 1, 2)]
            buckets = ends[1:].tolist(), counts.tolist()
            self._add(step, summary=histogram_raw(name, ends[0], ends[-1], *sums, *buckets))

    def flush(self, step: int) -> None:
        """Puts all that was written on disk."""
        self._file.flush()

    def close(self) -> None:
        """Ends the file."""
        self._file.close()


def check_wandb() -> None:
    """Raises a UserError if W&B is not installed."""
    try:
        import wandb  # noqa: F401
    except ImportError:
        how = "Run `pip install wandb`"
        raise UserError("logging.wandb needs the package wandb", how) from None


class Wandb(Writer):
    """The W&B run of this workdir, started or continued; its identity is kept in `wandb/run_id`."""

    def __init__(self, workdir: Path, config: Mapping[str, Any]):
        import wandb

        identity = workdir / "wandb" / "run_id"
        identity.parent.mkdir(parents=True, exist_ok=True)
        if not identity.exists():
            identity.write_text(secrets.token_hex(8))
        given = dict(project="gpt2", name=workdir.resolve().name, dir=str(workdir))
        given |= dict(id=identity.read_text(), resume="allow", config=dict(config))
        self._run = wandb.init(**given)  # of two values for a step, W&B keeps the first: the same

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs metrics by name."""
        self._run.log(dict(metrics), step=step)

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Logs histograms by name."""
        from wandb import Histogram as Shown

        pairs = ((name, (each.counts, each.edges)) for name, each in histograms.items())
        self._run.log({name: Shown(np_histogram=pair) for name, pair in pairs}, step=step)

    def close(self) -> None:
        """Ends the run, of which W&B may still send a part."""
        self._run.finish()
