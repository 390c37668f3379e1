"""Train several runs at a time, each as a process of train.py."""

import contextlib
import os
import re
import secrets
import signal
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TextIO

import numpy as np

from gpt2.errors import UserError, log
from gpt2.lab.experiments.processes import LocalSlot
from gpt2.lab.experiments.ray_runs import (
    NODE_LOST,
    RayProcess,
    RaySlot,
    make_ray_slots,
)
from gpt2.lab.experiments.run_folder import ENDED, Outcome, Run
from gpt2.utils.code import hash_code
from gpt2.utils.files import is_locked, try_lock, write_json
from gpt2.utils.ray_cluster import is_connected
from gpt2.utils.text import format_duration

Slot = LocalSlot | RaySlot  # resources, which one run at a time uses
_DIVERGED = 3  # the exit code of train.py for a run that diverged
# The outcome of each run when this process first read it. A run that had already failed by then is
# trained again. Such a run is recognised by its unchanged outcome and not by the time of its file,
# because the clocks of file servers differ.
_first_outcomes: dict[Path, Outcome] = {}


def make_slots(jobs: int | None = None) -> Sequence[Slot]:
    """Return the resources of `jobs` simultaneous runs: a GPU or some of the CPU cores for each.

    If `jobs` is 1, the runs may use all GPUs and all cores. Without `jobs`, there is one run at a
    time or, on a Ray cluster, as many as possible.
    """
    if is_connected():
        return make_ray_slots(jobs)
    jobs = jobs or 1
    cores = list(range(os.cpu_count() or 1))
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
    gpus = _visible_gpus() if jobs > 1 else []
    number = len(gpus or cores)
    if jobs > number:
        unit = "GPUs" if gpus else "CPU cores"
        raise UserError(
            f"--jobs={jobs} is more than the number of {unit}, {number}",
            f"Use --jobs={number} or fewer",
        )
    if gpus:
        every_core = frozenset(cores)
        return [
            LocalSlot(every_core, {"CUDA_VISIBLE_DEVICES": gpu}) for gpu in gpus[:jobs]
        ]
    slots = list[Slot]()
    for part in np.array_split(cores, jobs):
        slots.append(LocalSlot(frozenset(map(int, part)), {}))
    return slots


def _visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as identifiers for CUDA_VISIBLE_DEVICES."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return []
    number = len(list(Path("/dev").glob("nvidia[0-9]*")))
    every = ",".join(map(str, range(number)))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", every)
    # For CUDA, -1 means that there is no GPU.
    return [gpu for gpu in visible.split(",") if gpu not in ("", "-1")]


def train_all(runs: Sequence[Run], slots: Sequence[Slot], score: str = "") -> None:
    """Train the runs that have not ended. When a run ends, print its score or error.

    `slots` are the resources of simultaneous runs. `score` is the name of the metric to print.
    Without `score`, print only that a run has finished. Other processes may train the same runs at
    the same time. An interrupted run continues from its last checkpoint. A run that failed before
    this process began is trained again, but a diverged run is not, because it would diverge again.
    On SIGTERM, the runs in progress save their state.
    """
    start = time.monotonic()
    num_ended = 0  # number of runs that this call has trained until they ended
    free = list(slots)
    training = list[_Training]()
    codes = {run.source: hash_code(run.source) for run in runs}
    for run in runs:
        _first_outcomes.setdefault(run.folder, run.outcome())
    signal.signal(signal.SIGTERM, _stop)
    try:
        while training or not all(map(_has_ended, runs)):
            for run in runs:
                lock = _take(run) if free else None
                if lock is None:
                    continue
                if hash_code(run.source) != codes[run.source]:
                    raise UserError(
                        f"The code in {run.source} has changed since this command began",
                        "Undo the changes in this folder, and repeat the command",
                    )
                training.append(_Training(run, lock, free.pop()))
            for job in training[:]:
                code = job.process.poll()
                if code is not None:
                    training.remove(job)
                    free.append(job.slot)
                    if code == NODE_LOST:
                        job.interrupt()
                        print(
                            f"{job.run.label} has lost its node, and will continue from its last"
                            " checkpoint"
                        )
                        continue
                    result = job.end(code, score)
                    num_ended += 1
                    done = sum(map(_has_ended, runs))
                    line = f"{done} of {len(runs)} runs ended"
                    if len(runs) == 1:
                        line = "run ended"
                    if num_left := len(runs) - done:
                        seconds = (time.monotonic() - start) / num_ended * num_left
                        line += f", about {format_duration(seconds)} left"
                    line += f": {job.run.label}, {result}"
                    print(textwrap.fill(line, 80, subsequent_indent="  "), flush=True)
            time.sleep(0.2)
    finally:
        for job in training:
            job.process.terminate()
        for job in training:
            job.process.wait()  # the run saves its state before it ends
        for job in training:
            job.interrupt()


def _stop(number: int, _: object) -> NoReturn:
    log("stopped by SIGTERM; repeat the command to continue")
    sys.exit(128 + number)


def _has_ended(run: Run) -> bool:
    """Return whether a run has ended and needs no further training.

    A run that failed counts as ended only if it failed after this process began. A run that had
    failed before is trained again.
    """
    outcome = run.outcome()
    if outcome.state == "failed":
        return outcome != _first_outcomes[run.folder]
    return outcome.state in ENDED


def _take(run: Run) -> TextIO | None:
    """Lock a run, and return the lock.

    Return None if the run has ended, or if another process trains it.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    lock = open(run.folder / ".lock", "w")  # noqa: SIM115  _Training.end closes it
    if try_lock(lock.fileno()):
        # If a sweep was killed, one of its runs may still be saving its state.
        still_saves = is_locked(run.workdir / ".lock")
        if not still_saves and not _has_ended(run):
            return lock
    lock.close()
    return None


def find_error(log: str) -> str:
    """Return the line of `log`, the output of a program, that states why the program ended."""
    error = ""
    # The error is the last line that matches the most informative pattern, because JAX prints
    # further lines after a traceback. Each pattern is more informative than the one before it.
    for kind in (r".*\S", r"[\w.]+(?:Error|Exception)\b.*", "error: .*"):
        for line in re.findall(rf"^{kind}", log, re.MULTILINE):
            error = line.strip()
    return error


class _Training:
    """A run in progress: its process, the lock of its folder, and the slot (resources) it uses."""

    def __init__(self, run: Run, lock: TextIO, slot: Slot):
        self.run = run
        self.slot = slot
        self.lock = lock
        # The duration of the run's earlier processes, if they were interrupted.
        before = run.outcome()
        self._earlier = before.seconds if before.state == "waiting" else 0.0
        run.prepare()
        self._log = run.folder / "log.txt"
        self._log.touch()
        # Text before this offset is from earlier attempts.
        self._log_start = self._log.stat().st_size
        self._began = time.monotonic()
        command = [
            str(run.source / "train.py"),
            f"--config={run.folder / 'config.json'}",
            f"--workdir={run.workdir}",
        ]
        self.process = slot.start(command, self._log, {"WANDB_NAME": run.label})

    def interrupt(self) -> None:
        """Write how long the run has taken so far, and release its lock. The run will continue."""
        self.process.poll()  # tells a process on a Ray cluster its duration
        with contextlib.suppress(OSError):  # The disk may be full.
            self._write(Outcome("waiting", seconds=self._seconds()))

    def end(self, code: int, score: str) -> str:
        """Write the outcome of the run, release its lock, and return the score or the error.

        `code` is the exit code of the run's process, and `score` is the name of a metric.
        """
        outcome = self._read_outcome(code)
        self._write(outcome)
        if outcome.state == "finished" and score:
            return f"{score} {self.run.read(score)[-1][score]:.4f}"
        if outcome.error:
            return f"{outcome.state}: {outcome.error}"
        return outcome.state

    def _write(self, outcome: Outcome) -> None:
        write_json(self.run.folder / "outcome.json", outcome._asdict())
        self.lock.close()

    def _seconds(self) -> float:
        if isinstance(self.process, RayProcess):
            return self._earlier + self.process.seconds
        return self._earlier + time.monotonic() - self._began

    def _read_outcome(self, code: int) -> Outcome:
        """Return the outcome of the process, determined from its exit code and its log."""
        attempt = secrets.token_hex(4)
        seconds = self._seconds()
        if not code:
            return Outcome("finished", "", seconds, attempt)
        if code < 0:
            name = signal.Signals(-code).name
            return Outcome("failed", f"killed by {name}", seconds, attempt)
        log = self._log.read_bytes()[self._log_start :].decode(errors="replace")
        error = find_error(log) or f"exit code {code}"
        state = "diverged" if code == _DIVERGED else "failed"
        return Outcome(state, error, seconds, attempt)
