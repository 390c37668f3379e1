"""Trains the runs of a sweep, several at once, each in a process of its own."""

import contextlib
import ctypes
import dataclasses
import fcntl
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from gpt2.ablate.runs import Outcome, Run
from gpt2.errors import refuse
from gpt2.utils import files

_POLL_SECONDS = 0.2
_DIVERGED = 3  # the exit code of train.py
_PR_SET_PDEATHSIG = 1
_BEGAN = time.time()
_TRAIN = Path(__file__).parents[2] / "train.py"


@dataclasses.dataclass(frozen=True)
class Slot:
    """What one run at a time has for itself: CPUs, and variables of the environment."""

    cores: frozenset[int]
    environment: dict[str, str]


def make_slots(jobs: int) -> list[Slot]:
    """Returns what `jobs` runs at once have: an accelerator each, or a share of the cores."""
    cores = list(range(os.cpu_count() or 1))
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
    if jobs == 1:
        return [Slot(frozenset(cores), {})]
    gpus = _gpus()
    number = len(gpus or cores)
    refuse(jobs > number, f"--jobs={jobs} is more than the {number} GPUs or CPU cores")
    if gpus:
        return [Slot(frozenset(cores), {"CUDA_VISIBLE_DEVICES": gpu}) for gpu in gpus[:jobs]]
    share = len(cores) // jobs
    return [Slot(frozenset(cores[i * share : (i + 1) * share]), {}) for i in range(jobs)]


def _gpus() -> list[str]:
    """Returns the NVIDIA GPUs that this process may use, without touching them."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return []
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        # As CUDA reads it: those before the first that cannot be one.
        return [*itertools.takewhile(lambda gpu: gpu not in ("", "-1"), visible.split(","))]
    if not shutil.which("nvidia-smi"):
        return []
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    return [str(i) for i in range(len(listed.stdout.splitlines()))]


def train_all(
    runs: Sequence[Run],
    slots: Sequence[Slot],
    show: Callable[[Sequence[Run]], None] = lambda training: None,
) -> None:
    """Trains the runs that have not ended yet, beside other processes that do the same.

    A run that was interrupted continues. One that failed before this process began is tried again;
    one that diverged would diverge again. `show` receives the runs that train, now and then.
    """
    left, free, training = list(runs), list(slots), list[_Training]()
    before = {number: signal.signal(number, _stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while True:
            left = [run for run in left if not has_ended(run)]
            for run in left[:]:
                if free and (lock := _take(run)):
                    left.remove(run)
                    training.append(_Training(run, free.pop(), lock))
            for ended in [each for each in training if each.process.poll() is not None]:
                training.remove(ended)
                free.append(ended.slot)
                ended.end()
            show([each.run for each in training])
            if not left and not training:
                return
            time.sleep(_POLL_SECONDS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for each in training:
            each.process.terminate()
        for each in training:
            each.process.wait()  # which saves its state


def _stop(number: int, _: object) -> None:
    print(f"stopped by {signal.Signals(number).name}; the same command continues", flush=True)
    sys.exit(128 + number)


def has_ended(run: Run) -> bool:
    """Returns whether a run is not to be trained; one that failed before is tried again."""
    state = run.outcome().state
    failed_now = state == "failed" and (run.folder / "outcome.json").stat().st_mtime > _BEGAN
    return state in ("finished", "diverged") or failed_now


def _take(run: Run) -> TextIO | None:
    """Returns the lock of a run, or None if another process trains it or has just ended it."""
    run.folder.mkdir(parents=True, exist_ok=True)
    lock = open(run.folder / ".lock", "w")  # noqa: SIM115  _Training.end closes it
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A sweep that was killed leaves a run that still saves its state.
        if not files.is_locked(run.workdir / ".lock") and not has_ended(run):
            return lock
    lock.close()
    return None


class _Training:
    """A run that is training."""

    def __init__(self, run: Run, slot: Slot, lock: TextIO):
        self.run, self.slot, self._lock = run, slot, lock
        run.prepare()
        parent = os.getpid()
        with open(run.folder / "log.txt", "ab") as log:
            self._log_start = log.tell()  # of this try
            options = f"--config={run.folder / 'config.json'}", f"--workdir={run.workdir}"
            self.process = subprocess.Popen(
                [sys.executable, str(_TRAIN), *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | slot.environment,
                start_new_session=True,  # Ctrl-C comes to the sweep, which tells its runs
                preexec_fn=lambda: _at_start(slot.cores, parent),
            )

    def end(self) -> None:
        """Keeps how the process ended, and gives its lock back."""
        code, outcome = self.process.returncode, Outcome("finished")
        error = last_error(self.run.folder / "log.txt", self._log_start)
        if code == _DIVERGED:
            # The rest of the line names checkpoints, which depend on when the run was stopped.
            found = re.search(r"the [\w ]+ at step \d+", error)
            outcome = Outcome("diverged", found[0] if found else error)
        elif code < 0:
            outcome = Outcome("failed", f"killed by {signal.Signals(-code).name}")
        elif code:
            outcome = Outcome("failed", error or f"exit code {code}")
        self.run.write_outcome(outcome)
        self._lock.close()


def last_error(log: Path, start: int = 0) -> str:
    """Returns the last line from byte `start` of a log that tells of an error, or its last line."""
    text = log.read_bytes()[start:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1]


def _at_start(cores: frozenset[int], parent: int) -> None:
    """In a run's process: takes its cores, and ends when the sweep is killed."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, cores)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it was killed before this line
            os._exit(1)
