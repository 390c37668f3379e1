"""Report the metrics of training steps, one step late, to files and to the screen."""

import faulthandler
import math
import statistics
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import jax

from gpt2.config import Config, TrainConfig
from gpt2.errors import DivergedError, exit_process, log, warn
from gpt2.telemetry.metrics import MetricsFile
from gpt2.telemetry.progress import Progress
from gpt2.telemetry.throughput import StepClock
from gpt2.telemetry.writers import EventFile, Metrics, Wandb, Writer

Scalars = Mapping[str, jax.Array]
# For these metrics, a log line contains the values of its own step. For all other metrics of steps,
# it contains the mean over the steps since the previous log line.
_SINGLE_STEP = {
    "train/grad_norm",
    "train/learning_rate",
    "train/skipped_steps",
    "train/bad_in_a_row",
}


class Reporter(AbstractContextManager):
    """The reporter of a run's metrics, which never makes a device wait.

    It fetches the metrics of a step while the next step runs. It passes metrics to all `writers`
    every `train.log_every` steps, and at the first and the last step. `clock` measures the speed of
    the run, and `options` are the `train.` options.
    """

    def __init__(
        self,
        writers: Sequence[Writer],
        clock: StepClock,
        options: TrainConfig,
    ):
        self._writers = writers
        self._clock = clock
        self._options = options
        # The newest step, its metrics, and the norms of its tensors.
        self._pending: tuple[int, Scalars, Scalars | None] | None = None
        self._unlogged = list[
            dict[str, float]
        ]()  # metrics of the steps since the last log line
        self._warned = set[Writer]()

    @classmethod
    def for_run(
        cls,
        config: Config,
        clock: StepClock,
        workdir: Path,
        start: int,
    ) -> "Reporter":
        """Return the reporter of a run with the options `config`, which starts at step `start`.

        Only process 0 writes files to `workdir` and prints log lines.
        """
        train = config.train
        logging = config.logging
        writers: list[Writer] = [Watchdog(clock, train.hang_seconds)]
        if jax.process_index() == 0:
            path = workdir / "metrics.jsonl"
            writers.append(MetricsFile(path, start))
            if logging.tensorboard:
                events = workdir / "tensorboard"
                writers.append(EventFile(events, start))
            if logging.wandb:
                writers.append(Wandb(workdir, config))
            names = logging.screen.split(",")
            writers.append(Progress(train.num_steps, start, clock.flops, names))
        return cls(writers, clock, train)

    def step(
        self,
        step: int,
        metrics: Scalars,
        norms: Scalars | None = None,
    ) -> None:
        """Report the previous step, and store the metrics of `step` until the next call.

        Call this as soon as `step` is dispatched: it waits only for the previous step. If the norms
        of tensors are logged at `step`, `norms` contains the norms by name, otherwise it is None.
        """
        self.catch_up()
        self._pending = step, metrics, norms

    def catch_up(self) -> None:
        """Wait for the step whose metrics are stored, and report it. If there is none, do nothing.

        Raise DivergedError if the step has NaN or Inf, and `train.skip_bad_steps` does not allow
        skipping it.
        """
        if self._pending is None:
            return
        step, metrics, norms = self._pending
        self._pending = None
        values = _fetch(metrics)
        if norms is not None:
            # The norms are written first, because they help to find the cause if the run diverged.
            self.write(step, _fetch(norms))
        self._check(step, values)
        self._clock.count_step(step)
        self._call_writers(lambda writer: writer.step(step))
        is_due = step % self._options.log_every == 0
        if is_due or step in (1, self._options.num_steps):
            for name in values.keys() - _SINGLE_STEP:
                known = [each[name] for each in self._unlogged if name in each]
                # The mean is NaN if all steps since the last line were skipped.
                values[name] = statistics.fmean(known or [math.nan])
            self._unlogged.clear()
            # This is the ratio of means, not the mean of ratios, because the estimates of a single
            # step vary too much.
            if (signal := values.get("train/gradient_signal", 0.0)) > 0:
                values["train/noise_scale"] = values["train/gradient_noise"] / signal
            values["tokens"] = self._clock.tokens(step)
            values |= self._clock.read() | _peak_memory()
            self.write(step, values)

    def _check(self, step: int, values: dict[str, float]) -> None:
        """Collect the metrics of a step for the next log line, or log that the step was skipped.

        Raise DivergedError if the loss or the gradient norm is not finite, and more steps in a row
        are bad than `train.skip_bad_steps` allows.
        """
        loss = values["train/loss"]
        grad_norm = values["train/grad_norm"]
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        bad_in_a_row = values.get("train/bad_in_a_row", float(not is_finite))
        if bad_in_a_row > self._options.skip_bad_steps:
            what = "The gradients are" if math.isfinite(loss) else "The loss is"
            raise DivergedError(step, what, before=True)
        if not bad_in_a_row:
            known = dict(values)
            if not is_finite:  # The gradients of float16 have overflowed.
                known = {name: x for name, x in values.items() if math.isfinite(x)}
            self._unlogged.append(known)
            return
        if jax.process_index() == 0:
            log(
                f"step {step} is skipped: loss {loss:.4g}, gradient norm {grad_norm:.4g}",
                sys.stdout,
            )

    def write(self, step: int, values: Metrics) -> None:
        """Pass metrics to every writer."""
        self._call_writers(lambda writer: writer.write(step, values))

    def flush(self, step: int) -> None:
        """Make every writer write its metrics up to `step` to disk.

        A run calls this before it saves a checkpoint, so that no earlier metrics are lost.
        """
        self._call_writers(lambda writer: writer.flush(step))

    def _call_writers(self, call: Callable[[Writer], None]) -> None:
        """Call every writer. If a writer fails, print one warning and continue the run."""
        for writer in self._writers:
            try:
                call(writer)
            except OSError as error:
                if writer not in self._warned:
                    warn(f"{writer.name} cannot be written: {error.strerror}")
                self._warned.add(writer)

    def __exit__(self, *exception: object) -> None:
        self._call_writers(lambda writer: writer.close())


def _fetch(scalars: Scalars) -> dict[str, float]:
    return jax.tree.map(float, jax.device_get(scalars))


def _peak_memory() -> dict[str, float]:
    """Return `{"perf/peak_memory_bytes": BYTES}`, the largest peak of any device of this process.

    On CPUs, which do not report their memory, return {}.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peak = max(device.get("peak_bytes_in_use", 0) for device in stats)
    if not peak:
        return {}
    return {"perf/peak_memory_bytes": float(peak)}


class Watchdog(Writer):
    """A watchdog that ends this process if it no longer completes steps.

    First, the watchdog prints the stacks of all threads. Then it calls `end` with a message and an
    exit code. A step may take `least_seconds`, or ten times as long as recent steps if that is
    longer. If `least_seconds` is 0, the watchdog is off. `clock` shows whether the process is in a
    step. The watchdog's thread measures time by adding up its own pauses instead of reading a
    clock, so that time in which the process is suspended does not count.
    """

    EXIT_CODE = 4
    # Time limit of the first step in seconds. Other processes may still compile during this step.
    FIRST_SECONDS = 1800.0

    def __init__(
        self,
        clock: StepClock,
        least_seconds: float,
        end: Callable = exit_process,
    ):
        self._clock = clock
        self._least = least_seconds
        self._end = end
        self._quiet = 0.0
        self._allowed = math.nan
        self._closed = threading.Event()
        if least_seconds:
            thread = threading.Thread(target=self._watch, daemon=True)
            thread.start()

    def step(self, step: int) -> None:
        """Record that a step is done. The time limit of the next step begins."""
        # If the host records a step late, the next step seems short. The limit therefore falls by
        # at most 10 % per step.
        self._allowed = max(10 * self._quiet, 0.9 * self._allowed)
        self._quiet = 0.0

    def close(self) -> None:
        """End the watchdog's thread."""
        self._closed.set()

    def _watch(self) -> None:
        pause = min(5.0, self._least / 10)
        while not self._closed.wait(pause):
            # Steps are completed only in these phases. Validations and checkpoints have no limit.
            if self._clock.current in ("step", "data wait"):
                self._quiet += pause
            allowed = self._allowed
            if math.isnan(allowed):
                allowed = self.FIRST_SECONDS
            if self._quiet > max(self._least, allowed):
                faulthandler.dump_traceback(sys.stderr)
                message = (
                    "error: The run hangs: no step was completed in time. "
                    "Run the same command again to continue."
                )
                return self._end(message, self.EXIT_CODE)
