"""Writers of a run's metrics: their interface, TensorBoard's event file, and W&B."""

import importlib.util
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from gpt2.config import Config
from gpt2.errors import UserError
from gpt2.utils.files import write_text

Metrics = Mapping[str, float]  # name -> value


class Writer:
    """The interface of writers of metrics. Every method may be left out.

    If a method raises OSError, the reporter prints one warning, and the run continues.
    """

    name = ""  # the destination, as the warning names it: "NAME cannot be written"

    def step(self, step: int) -> None:
        """Record that a step is done, whether or not its metrics are logged."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Add metrics of a step, by name. Several calls may add metrics of the same step."""

    def flush(self, step: int) -> None:
        """Write all metrics up to `step` to disk."""

    def close(self) -> None:
        """Write the remaining metrics, and close files."""


class EventFile(Writer):
    """The writer of a TensorBoard event file in `directory`.

    `resume_step` is the step at which this process starts, 0 for a new run. tensorboardX's
    SummaryWriter is not used, because it hangs on a full disk.
    """

    name = "tensorboard/"

    def __init__(self, directory: Path, resume_step: int):
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        directory.mkdir(parents=True, exist_ok=True)
        self._event = Event
        self._scalar = summary.scalar
        # tensorboardX writes the time of creation, in whole seconds, into a file's name, and would
        # replace a file that was created in the same second.
        suffix = f".{time.time_ns()}"
        prefix = str(directory / "events")
        self._file = event_file_writer.EventsWriter(prefix, filename_suffix=suffix)
        # This event makes TensorBoard ignore values that a killed run wrote at or after this step.
        start = SessionLog(status=SessionLog.START)
        self._add(resume_step + 1, session_log=start)

    def _add(self, step: int, **content: object) -> None:
        now = time.time()
        event = self._event(step=step, wall_time=now, **content)
        self._file.write_event(event)

    def write(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of a step as scalars."""
        for name, value in metrics.items():
            scalar = self._scalar(name, value)
            self._add(step, summary=scalar)

    def flush(self, step: int) -> None:
        """Write all events to disk."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def check_wandb() -> None:
    """Log in to W&B. Raise a UserError if this fails, or if the package wandb is not installed.

    In W&B's offline mode, no login is necessary.
    """
    if importlib.util.find_spec("wandb") is None:
        raise UserError(
            "logging.wandb=True needs the package wandb", "Run `pip install wandb`"
        )
    import wandb

    try:
        if wandb.setup().settings.mode == "online":
            wandb.login()  # prompts for a key if stdin is a terminal
    except wandb.Error as error:
        raise UserError(
            f"logging.wandb=True cannot log in ({error})",
            "Run `wandb login`, or set WANDB_MODE=offline",
        ) from error


class Wandb(Writer):
    """A writer that logs the metrics of a run to W&B.

    If `workdir` contains the file `wandb/run_id` with the ID of a W&B run, continue the W&B run.
    Otherwise, start a W&B run, and write its ID to this file.
    """

    name = "wandb/"

    def __init__(self, workdir: Path, config: Config):
        import wandb

        id_file = workdir / "wandb" / "run_id"
        if not id_file.exists():
            id_file.parent.mkdir(parents=True, exist_ok=True)
            write_text(id_file, secrets.token_hex(8))
        # A continued run logs some steps again. W&B retains the first values, which are the same.
        self._run = wandb.init(
            project=config.logging.wandb_project,
            id=id_file.read_text(),
            resume="allow",
            name=os.environ.get("WANDB_NAME", workdir.resolve().name),
            dir=str(workdir),
            config=config.to_dict(),
        )

    def write(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run, and wait until W&B has sent its data."""
        self._run.finish()
