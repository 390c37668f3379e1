"""TensorBoard's event file, the histograms that go into it, and what every writer offers."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

NUM_BUCKETS = 32  # TensorBoard draws 30


class Histogram(NamedTuple):
    """How many values of a tensor lie in each of `NUM_BUCKETS` buckets of equal width.

    `low` and `high` are the least and the largest value, `counts` is [NUM_BUCKETS] int32.
    """

    low: Any
    high: Any
    counts: Any

    @property
    def edges(self) -> np.ndarray:
        """The ends of the buckets, one more than there are buckets."""
        return np.linspace(float(self.low), float(self.high), NUM_BUCKETS + 1)


class Writer:
    """Takes the metrics of a run; a context manager. A writer of one's own overrides a part."""

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

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class EventFile(Writer):
    """Scalars and histograms in a TensorBoard event file, written immediately and in order.

    tensorboardX's SummaryWriter would hand them to a thread, which its flush does not wait for and
    which a full disk ends. Its EventsWriter is the plain file underneath.
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
            shown = histogram_raw(
                name, ends[0], ends[-1], *sums, ends[1:].tolist(), counts.tolist()
            )
            self._add(step, summary=shown)

    def flush(self, step: int) -> None:
        """Puts all that was written on disk."""
        self._file.flush()

    def close(self) -> None:
        """Ends the file."""
        self._file.close()
