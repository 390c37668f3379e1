"""Reports the metrics of training steps, one step late, to files and to the screen."""

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
# Metrics of the loss are means since the last line; these are of its step.
_OF_A_STEP = {
    "train/grad_norm",
    "train/learning_rate",
    "train/skipped_steps",
    "train/bad_in_a_row",
}


class Reporter(AbstractContextManager):
    """Fetches the metrics of each step while the next one runs, so that no device waits for them.

    Each scalar is logged under its name, every `log_every` steps, at the first and at the last.
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
        # A step, its metrics, its tensors' norms.
        self._late: tuple[int, Scalars, Scalars | None] | None = None
        self._taken = list[dict[str, float]]()  # metrics of steps since the last line
        self._warned = set[Writer]()

    @classmethod
    def for_run(
        cls,
        config: Config,
        clock: StepClock,
        workdir: Path,
        start: int,
    ) -> "Reporter":
        """Returns what reports a run to its files and the screen, in the first process alone."""
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
            screen = logging.screen.split(",")
            progress = Progress(
                train.num_steps,
                start,
                clock.flops,
                screen,
            )
            writers.append(progress)
        return cls(writers, clock, train)

    def step(
        self,
        step: int,
        metrics: Scalars,
        norms: Scalars | None = None,
    ) -> None:
        """Takes what a step just dispatched will give, and reports the step before.

        `norms` are those of tensors, by name, if the step is watched.
        """
        self.catch_up()
        self._late = step, metrics, norms

    def catch_up(self) -> None:
        """Waits for the newest step and reports it; a DivergedError if it holds NaN or Inf."""
        if self._late is None:
            return
        step, metrics, norms = self._late
        self._late = None
        values = _fetch(metrics)
        if norms is not None:  # of a step that diverges too
            self.write(step, _fetch(norms))
        self._judge(step, values)
        self._clock.count_step(step)
        self._each(lambda writer: writer.step(step))
        is_due = step % self._options.log_every == 0
        if is_due or step in (1, self._options.num_steps):
            # NaN if all steps since the last line are skipped.
            taken = self._taken or [dict.fromkeys(values, math.nan)]
            for name in values.keys() - _OF_A_STEP:
                values[name] = statistics.fmean(each[name] for each in taken)
            self._taken.clear()
            values["tokens"] = self._clock.tokens(step)
            values |= self._clock.read() | _peak_memory()
            self.write(step, values)

    def _judge(self, step: int, values: dict[str, float]) -> None:
        """Raises if a step ends the run, tells of one that is skipped, or keeps its metrics."""
        loss = values["train/loss"]
        grad_norm = values["train/grad_norm"]
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        bad_in_a_row = values.get("train/bad_in_a_row", float(not is_finite))
        if bad_in_a_row > self._options.skip_bad_steps:
            what = "the gradients are" if math.isfinite(loss) else "the loss is"
            raise DivergedError(step, what, before=True)
        if not bad_in_a_row:
            self._taken.append(dict(values))
            return
        if jax.process_index() == 0:
            told = f"its loss {loss:.4g}, gradient norm {grad_norm:.4g}"
            log(f"step {step} is skipped: {told}", sys.stdout)

    def write(self, step: int, values: Metrics) -> None:
        """Hands metrics to every writer."""
        self._each(lambda writer: writer.write(step, values))

    def flush(self, step: int) -> None:
        """Puts all metrics on disk: before a checkpoint."""
        self._each(lambda writer: writer.flush(step))

    def _each(self, use: Callable[[Writer], None]) -> None:
        """Uses every writer. What cannot be written is told once."""
        for writer in self._writers:
            try:
                use(writer)
            except OSError as error:
                if writer not in self._warned:
                    warn(f"{type(writer).__name__}: {error.strerror}; the run goes on")
                self._warned.add(writer)

    def __exit__(self, *exception: object) -> None:
        self._each(lambda writer: writer.close())


def _fetch(scalars: Scalars) -> dict[str, float]:
    return jax.tree.map(float, jax.device_get(scalars))


def _peak_memory() -> dict[str, float]:
    """Returns the most bytes that a local device has held; CPUs do not tell."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peak = max(each.get("peak_bytes_in_use", 0) for each in stats)
    if not peak:
        return {}
    return {"perf/peak_memory_bytes": float(peak)}


class Watchdog(Writer):
    """Ends a process whose steps stop coming, with the stacks of its threads.

    A step may take `least_seconds` (0: any time) and ten times as long as those just before. Time
    in which the process was stopped does not count: a thread counts its looks.
    """

    EXIT_CODE = 4
    FIRST_SECONDS = 1800.0  # before the first step, while other processes may compile

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
        """Hears that a step came."""
        # One that seems short, since the host was late, is no measure of the next.
        self._allowed = max(10 * self._quiet, 0.9 * self._allowed)
        self._quiet = 0.0

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()

    def _watch(self) -> None:
        pause = min(5.0, self._least / 10)
        while not self._closed.wait(pause):
            if self._clock.current in ("step", "data wait"):  # where steps should end
                self._quiet += pause
            allowed = self._allowed
            if math.isnan(allowed):
                allowed = self.FIRST_SECONDS
            if self._quiet > max(self._least, allowed):
                faulthandler.dump_traceback(sys.stderr)
                told = "error: the run hangs: no step came in time; the same command continues"
                return self._end(told, self.EXIT_CODE)
