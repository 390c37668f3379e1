"""TensorBoard's event file, and the histograms that go into it."""

import itertools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

NUM_BUCKETS = 32  # TensorBoard draws 30


class Histogram(NamedTuple):
    """How many values of a tensor lie in each of `NUM_BUCKETS` buckets of equal width.

    Attributes:
        low, high: the least and the largest value, float scalars.
        counts: [NUM_BUCKETS] int32.
    """

    low: Any
    high: Any
    counts: Any

    @property
    def edges(self) -> list[float]:
        """The ends of the buckets, one more than there are buckets."""
        width = (float(self.high) - float(self.low)) / NUM_BUCKETS
        return [float(self.low) + i * width for i in range(NUM_BUCKETS)] + [float(self.high)]


class EventFile:
    """Scalars and histograms in a TensorBoard event file, written immediately and in order.

    tensorboardX's SummaryWriter would hand them to a thread over a queue, and its flush does not
    wait for the queue. Its EventsWriter is the plain file underneath.

    Args:
        directory: where TensorBoard finds it.
        resume_step: the step that the run continues from.
    """

    def __init__(self, directory: Path, resume_step: int):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        self._event, self._scalar = Event, scalar
        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names, which count whole seconds. A file of
        # the same name would be replaced.
        suffix = f".{time.time_ns()}"
        self._file = EventsWriter(str(directory / "events"), filename_suffix=suffix)
        # TensorBoard then forgets what a killed run wrote from this step on.
        start = SessionLog(status=SessionLog.START)
        event = Event(step=resume_step + 1, wall_time=time.time(), session_log=start)
        self._file.write_event(event)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes scalars by name."""
        now = time.time()
        for name, value in metrics.items():
            summary = self._scalar(name, value)
            self._file.write_event(self._event(step=step, wall_time=now, summary=summary))

    def add_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Writes histograms by name."""
        from tensorboardX.summary import histogram_raw

        now = time.time()
        for name, each in histograms.items():
            edges, counts = each.edges, [int(count) for count in each.counts]
            # Sums are of the buckets' middles. TensorBoard asks for them, and shows none.
            middles = [(start + end) / 2 for start, end in itertools.pairwise(edges)]
            sums = [
                sum(c * m**power for c, m in zip(counts, middles, strict=True)) for power in (1, 2)
            ]
            summary = histogram_raw(
                name, edges[0], edges[-1], sum(counts), *sums, edges[1:], counts
            )
            self._file.write_event(self._event(step=step, wall_time=now, summary=summary))

    def flush(self) -> None:
        """Puts all that was written on disk."""
        self._file.flush()

    def close(self) -> None:
        """Ends the file."""
        self._file.close()
