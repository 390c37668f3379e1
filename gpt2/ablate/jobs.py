"""Trains the runs of a sweep, several at once, each in a process of its own, here or by Ray."""

import contextlib
import fcntl
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from gpt2.ablate.results import read_results
from gpt2.ablate.runs import Outcome, Run
from gpt2.errors import UserError
from gpt2.training.code import hash_code
from gpt2.utils.cluster import Slot, start
from gpt2.utils.files import is_locked, write_json

_POLL_SECONDS = 0.2
_DIVERGED = 3  # the exit code of train.py
_BEGAN = time.time()


def make_slots(jobs: int | None, ray: Any = None) -> list[Slot]:
    """Returns what `jobs` runs at once have: an accelerator each, or a share of the cores."""
    if ray:
        return _slots_of_cluster(jobs, ray)
    linux = sys.platform == "linux"
    jobs = jobs or 1
    cores = (
        sorted(os.sched_getaffinity(0)) if linux else list(range(os.cpu_count() or 1))
    )
    if jobs == 1:
        return [Slot(frozenset(cores), {})]
    found = map(str, range(len(list(Path("/dev").glob("nvidia[0-9]*")))))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(found)).split(",")
    on_cpu = os.environ.get("JAX_PLATFORMS") == "cpu"
    gpus = [gpu for gpu in visible if gpu not in ("", "-1") and not on_cpu]
    number = len(gpus or cores)
    if jobs > number:
        raise UserError(f"--jobs={jobs} is more than the {number} GPUs or CPU cores")
    if gpus:
        return [
            Slot(frozenset(cores), {"CUDA_VISIBLE_DEVICES": gpu}) for gpu in gpus[:jobs]
        ]
    share = len(cores) // jobs
    return [
        Slot(frozenset(cores[i * share : (i + 1) * share]), {}) for i in range(jobs)
    ]


def _slots_of_cluster(jobs: int | None, ray: Any) -> list[Slot]:
    """Returns what Ray keeps for each run: a GPU, a TPU's host, or a host or its share of cores."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    kind = next(
        kind for kind in ("GPU", "TPU", "CPU") if any(kind in node for node in nodes)
    )
    sizes = [int(node[kind]) for node in nodes if kind in node]
    number = jobs or (sum(sizes) if kind == "GPU" else len(sizes))
    tasks: dict[str, dict[str, Any]] = {
        "GPU": {"num_gpus": 1},
        "TPU": {"resources": {"TPU": min(sizes)}},
        "CPU": {"num_cpus": max(1, min(*sizes, sum(sizes) // number))},
    }
    return [Slot(frozenset(), {}, tasks[kind])] * number


def train_all(
    runs: Sequence[Run], slots: Sequence[Slot], score: str, max_hours: float
) -> None:
    """Trains the runs that have not ended yet, beside other processes that do the same.

    A run that was interrupted continues. One that failed before this process began is tried again;
    one that diverged would diverge again. Each run that ends is told with its score. When this
    process is `max_hours` old, what still trains is saved and stops.
    """
    left = list(runs)
    free = list(slots)
    training = list[_Training]()
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
                    if changed:
                        raise UserError(what, "Put it back, and repeat the command")
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
    failed_now = (
        state == "failed" and (run.folder / "outcome.json").stat().st_mtime > _BEGAN
    )
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
        self.run = run
        self.slot = slot
        self._lock = lock
        run.prepare()
        options = f"--config={run.folder / 'config.json'}", f"--workdir={run.workdir}"
        command = [str(run.source / "train.py"), *options]
        log = run.folder / "log.txt"
        self._log_start = log.stat().st_size if log.exists() else 0  # of this try
        self.process = start(command, log, run.workdir / ".lock", slot)

    def end(self, score: str) -> str:
        """Keeps how the process ended, gives its lock back, and returns what to tell of it."""
        code = self.process.poll() or 0
        outcome = Outcome("finished")
        log = (self.run.folder / "log.txt").read_bytes()[self._log_start :]
        lines = [
            line.strip()
            for line in log.decode(errors="replace").splitlines()
            if line.strip()
        ]
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
