"""Trains the runs of a sweep, several at once, each in a process of its own."""

import contextlib
import ctypes
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from gpt2.ablate.results import read_results
from gpt2.ablate.runs import Outcome, Run
from gpt2.errors import refuse
from gpt2.training.code import hash_code
from gpt2.utils.files import is_locked, write_json

_POLL_SECONDS = 0.2
_DIVERGED = 3  # the exit code of train.py
_PR_SET_PDEATHSIG = 1
_BEGAN = time.time()


class Slot(NamedTuple):
    """What one run at a time has for itself: CPUs, and variables of the environment."""

    cores: frozenset[int]
    environment: dict[str, str]


def make_slots(jobs: int) -> list[Slot]:
    """Returns what `jobs` runs at once have: an accelerator each, or a share of the cores."""
    linux = sys.platform == "linux"
    cores = sorted(os.sched_getaffinity(0)) if linux else list(range(os.cpu_count() or 1))
    if jobs == 1:
        return [Slot(frozenset(cores), {})]
    found = map(str, range(len(list(Path("/dev").glob("nvidia[0-9]*")))))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(found)).split(",")
    on_cpu = os.environ.get("JAX_PLATFORMS") == "cpu"
    gpus = [gpu for gpu in visible if gpu not in ("", "-1") and not on_cpu]
    number = len(gpus or cores)
    refuse(jobs > number, f"--jobs={jobs} is more than the {number} GPUs or CPU cores")
    if gpus:
        return [Slot(frozenset(cores), {"CUDA_VISIBLE_DEVICES": gpu}) for gpu in gpus[:jobs]]
    share = len(cores) // jobs
    return [Slot(frozenset(cores[i * share : (i + 1) * share]), {}) for i in range(jobs)]


def train_all(runs: Sequence[Run], slots: Sequence[Slot], score: str, max_hours: float) -> None:
    """Trains the runs that have not ended yet, beside other processes that do the same.

    A run that was interrupted continues. One that failed before this process began is tried again;
    one that diverged would diverge again. Each run that ends is told with its score. When this
    process is `max_hours` old, what still trains is saved and stops.
    """
    left, free, training = list(runs), list(slots), list[_Training]()
    codes = {source: hash_code(source) for source in {run.source for run in runs}}
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        while True:
            left = [run for run in left if not _has_ended(run)]
            if (left or training) and time.time() > _BEGAN + 3600 * max_hours:
                print("--max_hours have passed; the same command continues", flush=True)
                return
            for run in left[:]:
                if free and (lock := take(run)):
                    what = f"the code has changed while the sweep trained, and {run.label} waits"
                    changed = hash_code(run.source) != codes[run.source]
                    refuse(changed, what, "Put it back, and repeat the command")
                    left.remove(run)
                    training.append(_Training(run, free.pop(), lock))
            for ended in [each for each in training if each.process.poll() is not None]:
                training.remove(ended)
                free.append(ended.slot)
                told = ended.end(score)
                done = len(runs) - len(left) - len(training)
                print(f"{done}/{len(runs)}  {ended.run.label}  {told}", flush=True)
            if not left and not training:
                return
            time.sleep(_POLL_SECONDS)
    finally:
        signal.signal(signal.SIGTERM, before)
        for each in training:
            each.process.terminate()
        for each in training:
            each.process.wait()  # which saves its state


def _has_ended(run: Run) -> bool:
    """Returns whether a run is not to be trained; one that failed before is tried again."""
    state = run.outcome().state
    failed_now = state == "failed" and (run.folder / "outcome.json").stat().st_mtime > _BEGAN
    return state in ("finished", "diverged") or failed_now


def take(run: Run) -> TextIO | None:
    """Returns the lock of a run, or None if it has ended or another process trains it."""
    run.folder.mkdir(parents=True, exist_ok=True)
    lock = open(run.folder / ".lock", "w")  # noqa: SIM115  who takes it closes it
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A sweep that was killed leaves a run that still saves its state.
        if not is_locked(run.workdir / ".lock") and not _has_ended(run):
            return lock
    lock.close()
    return None


class _Training:
    """A run that is training."""

    def __init__(self, run: Run, slot: Slot, lock: TextIO):
        self.run, self.slot, self._lock = run, slot, lock
        run.prepare()
        with open(run.folder / "log.txt", "ab") as log:
            self._log_start = log.tell()  # of this try
            options = f"--config={run.folder / 'config.json'}", f"--workdir={run.workdir}"
            self.process = subprocess.Popen(
                [sys.executable, str(run.source / "train.py"), *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | slot.environment,
                start_new_session=True,  # Ctrl-C comes to the sweep, which tells its runs
                preexec_fn=lambda: _at_start(slot.cores),
            )

    def end(self, score: str) -> str:
        """Keeps how the process ended, gives its lock back, and returns what to tell of it."""
        code, outcome = self.process.returncode, Outcome("finished")
        log = (self.run.folder / "log.txt").read_bytes()[self._log_start :]
        lines = [line.strip() for line in log.decode(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        error = [f"exit code {code}", *lines[-1:], *errors][-1]
        if code == _DIVERGED:
            # The rest of the line names checkpoints, which depend on when the run was stopped.
            found = re.search(r"the [\w ]+ at step \d+", error)
            outcome = Outcome("diverged", found[0] if found else error)
        elif code < 0:
            outcome = Outcome("failed", f"killed by {signal.Signals(-code).name}")
        elif code:
            outcome = Outcome("failed", error)
        write_json(self.run.folder / "outcome.json", outcome._asdict())
        self._lock.close()
        if outcome.state == "finished":
            return f"{read_results([self.run], score).score[0]:.4f}"
        return f"{outcome.state}: {outcome.error}"


def _at_start(cores: frozenset[int]) -> None:
    """In a run's process: takes its cores, and ends when the sweep is killed."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, cores)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
