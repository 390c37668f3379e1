"""What takes a run's metrics: what every writer offers, TensorBoard's event file, and W&B."""

import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from gpt2.config import Config

Metrics = Mapping[str, float]  # by name


class Writer:
    """Takes the metrics of a run, or some of them. An OSError is told once, and ends no run."""

    def step(self, step: int) -> None:
        """Hears that a step is done, with metrics or not."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Adds metrics of a step, by name."""

    def flush(self, step: int) -> None:
        """Puts all metrics up to `step` on disk."""

    def close(self) -> None:
        """Writes what is left."""


class EventFile(Writer):
    """A TensorBoard event file. tensorboardX's SummaryWriter would hang where the disk is full."""

    def __init__(self, directory: Path, resume_step: int):
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        directory.mkdir(parents=True, exist_ok=True)
        self._event = Event
        self._scalar = summary.scalar
        # Names count whole seconds: a file of the same name would be replaced.
        suffix = f".{time.time_ns()}"
        prefix = str(directory / "events")
        self._file = event_file_writer.EventsWriter(prefix, filename_suffix=suffix)
        # TensorBoard then forgets what a killed run wrote from this step on.
        start = SessionLog(status=SessionLog.START)
        self._add(resume_step + 1, session_log=start)

    def _add(self, step: int, **content: object) -> None:
        now = time.time()
        event = self._event(step=step, wall_time=now, **content)
        self._file.write_event(event)

    def write(self, step: int, metrics: Metrics) -> None:
        """Writes scalars by name."""
        for name, value in metrics.items():
            scalar = self._scalar(name, value)
            self._add(step, summary=scalar)

    def flush(self, step: int) -> None:
        """Puts all that was written on disk."""
        self._file.flush()

    def close(self) -> None:
        """Ends the file."""
        self._file.close()


class Wandb(Writer):
    """The W&B run of this workdir, started or continued; its identity is kept in `wandb/run_id`."""

    def __init__(self, workdir: Path, config: Config):
        import wandb

        identity = workdir / "wandb" / "run_id"
        if not identity.exists():
            identity.parent.mkdir(parents=True, exist_ok=True)
            identity.write_text(secrets.token_hex(8))
        # Of two values for a step, W&B keeps the first: the same.
        self._run = wandb.init(
            project=config.logging.wandb_project,
            id=identity.read_text(),
            resume="allow",
            name=os.environ.get("WANDB_NAME", workdir.resolve().name),
            dir=str(workdir),
            config=config.to_dict(),
        )

    def write(self, step: int, metrics: Metrics) -> None:
        """Logs metrics by name."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Ends the run, of which W&B may still send a part."""
        self._run.finish()
