"""Trains the runs of a sweep, several at once, each in a process of its own."""

import contextlib
import fcntl
import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import numpy as np

from gpt2.errors import UserError
from gpt2.lab.ablate.runs import ENDED, Outcome, Run
from gpt2.utils.cluster import Slot, start
from gpt2.utils.code import hash_code
from gpt2.utils.files import is_locked, write_json

_DIVERGED = 3  # the exit code of train.py
_BEGAN = time.time()


def make_slots(jobs: int) -> list[Slot]:
    """Returns what `jobs` runs at once have: an accelerator each, or a share of the cores."""
    cores = list(range(os.cpu_count() or 1))
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
    gpus = _visible_gpus() if jobs > 1 else []
    number = len(gpus or cores)
    if jobs > number:
        raise UserError(f"--jobs={jobs} is more than the {number} GPUs or CPU cores")
    if gpus:
        whole = frozenset(cores)
        return [Slot(whole, {"CUDA_VISIBLE_DEVICES": gpu}) for gpu in gpus[:jobs]]
    slots = []
    for share in np.array_split(cores, jobs):
        slots.append(Slot(frozenset(map(int, share)), {}))
    return slots


def _visible_gpus() -> list[str]:
    """Returns the names by which CUDA knows the GPUs of this process."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return []
    number = len(list(Path("/dev").glob("nvidia[0-9]*")))
    every = ",".join(map(str, range(number)))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", every)
    # To CUDA, -1 is none.
    return [gpu for gpu in visible.split(",") if gpu not in ("", "-1")]


def train_all(
    groups: Sequence[Sequence[Run]], slots: Sequence[Slot], score: str
) -> None:
    """Trains the runs that have not ended yet, beside other processes that do the same.

    Those of a group train together, in one process. A run that was interrupted continues. One that
    failed before this process began is tried again; one that diverged would diverge again. Each run
    that ends is told with its score. SIGTERM saves what still trains.
    """
    runs = list(itertools.chain(*groups))
    free = list(slots)
    training = list[_Training]()
    codes = {run.source: hash_code(run.source) for run in runs}
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        while True:
            if all(map(_has_ended, runs)) and not training:
                return
            for group in groups:
                taken = []
                for run in group:
                    if free and (lock := _take(run)):
                        taken.append((run, lock))
                if not taken:
                    continue
                run, _ = taken[0]
                if hash_code(run.source) != codes[run.source]:
                    raise UserError(
                        f"the code has changed while the sweep trained, and {run.label} waits",
                        "Put it back, and repeat the command",
                    )
                is_mapped = len(group) > 1  # also where one is left of it
                training.append(_Training(taken, free.pop(), is_mapped))
            for each in training[:]:
                code = each.process.poll()
                for run, told in each.ended(code, score):
                    done = sum(map(_has_ended, runs))
                    print(f"{done}/{len(runs)}  {run.label}  {told}", flush=True)
                if code is not None:
                    training.remove(each)
                    free.append(each.slot)
            time.sleep(0.2)
    finally:
        for each in training:
            each.process.terminate()
        for each in training:
            each.process.wait()  # which saves its state


def _has_ended(run: Run) -> bool:
    """Returns whether a run is not to be trained; one that failed before is tried again."""
    state = run.outcome().state
    if state == "failed":
        return (run.folder / "outcome.json").stat().st_mtime > _BEGAN
    return state in ENDED


def _take(run: Run) -> TextIO | None:
    """Returns the lock of a run, or None if it has ended or another process trains it."""
    run.folder.mkdir(parents=True, exist_ok=True)
    lock = open(run.folder / ".lock", "w")  # noqa: SIM115  who takes it closes it
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A sweep that was killed leaves a run that still saves its state.
        still_saves = is_locked(run.workdir / ".lock")
        if not still_saves and not _has_ended(run):
            return lock
    lock.close()
    return None


class _Training:
    """A run that is training, or several together. The first one's log is that of the process."""

    def __init__(
        self,
        taken: list[tuple[Run, TextIO]],
        slot: Slot,
        is_mapped: bool,
    ):
        self.slot = slot
        self._taken = taken
        folders = []
        for run, _ in taken:
            run.prepare()
            folders.append(str(run.folder))
        first, _ = taken[0]
        self._log = first.folder / "log.txt"
        self._log.touch()
        self._log_start = self._log.stat().st_size  # of this try
        command = ["-m", "gpt2.lab.ablate.together", *folders]
        if not is_mapped:
            command = [
                str(first.source / "train.py"),
                f"--config={first.folder / 'config.json'}",
                f"--workdir={first.workdir}",
            ]
        environment = slot.environment | {"WANDB_NAME": first.label}
        named = slot._replace(environment=environment)
        self.process = start(command, self._log, named)

    def ended(self, code: int | None, score: str) -> Iterator[tuple[Run, str]]:
        """Keeps how runs ended, gives their locks back, and yields them with what to tell.

        `code` is that of the process, None while it trains: together, runs end one by one.
        """
        for run, lock in self._taken[:]:
            outcome = run.outcome()
            if outcome.state == "waiting":  # together, runs keep it themselves
                if code is None:
                    continue
                outcome = self._read_outcome(code)
                write_json(run.folder / "outcome.json", outcome._asdict())
            self._taken.remove((run, lock))
            lock.close()
            told = f"{outcome.state}: {outcome.error}"
            if outcome.state == "finished":
                told = f"{run.read(score)[-1][score]:.4f}"
            yield run, told

    def _read_outcome(self, code: int) -> Outcome:
        """Returns how the process ended, by its exit code and its log."""
        if not code:
            return Outcome("finished")
        if code < 0:
            return Outcome("failed", f"killed by {signal.Signals(-code).name}")
        error = f"exit code {code}"
        log = self._log.read_bytes()[self._log_start :].decode(errors="replace")
        # The last line of the kind that tells most: JAX ends tracebacks with words of its own.
        for kind in (r".*\S", r"[\w.]+(?:Error|Exception)\b.*", "error: .*"):
            for line in re.findall(rf"^{kind}", log, re.MULTILINE):
                error = line.strip()
        return Outcome("diverged" if code == _DIVERGED else "failed", error)
