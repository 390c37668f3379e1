"""Trains the runs of a sweep, several at once, each in a process of its own."""

import contextlib
import ctypes
import dataclasses
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import configs
from gpt2.ablate.runs import Outcome, Run
from gpt2.errors import UserError
from gpt2.utils import files

_POLL_SECONDS = 0.2
_FULL_BYTES = 1 << 16  # a run that failed with less room has probably failed for want of it
_DIVERGED = 3  # the exit code of train.py
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PR_SET_PDEATHSIG = 1


class Stopped(Exception):
    """A signal ended the sweep. Its runs have saved their states.

    Args:
        signal: which one.
    """

    def __init__(self, signal: signal.Signals):
        self.signal = signal
        super().__init__(signal.name)


@dataclasses.dataclass(frozen=True)
class Slot:
    """What one run at a time has for itself.

    Attributes:
        cores: the CPUs that it may use.
        environment: variables beside this process's own.
    """

    cores: frozenset[int]
    environment: dict[str, str]


def make_slots(jobs: int) -> list[Slot]:
    """Returns room for `jobs` runs at once: an accelerator each, or a share of the cores.

    Raises:
        UserError: there are not as many.
    """
    cores = _cores()
    if jobs == 1:
        return [Slot(frozenset(cores), {})]
    gpus = _gpus()
    if gpus:
        if jobs > len(gpus):
            raise UserError(f"--jobs={jobs} is more than the {len(gpus)} GPUs", "Use fewer")
        return [Slot(frozenset(cores), {"CUDA_VISIBLE_DEVICES": gpu}) for gpu in gpus[:jobs]]
    if jobs > len(cores):
        raise UserError(f"--jobs={jobs} is more than the {len(cores)} CPU cores", "Use fewer")
    share = len(cores) // jobs
    return [Slot(frozenset(cores[i * share : (i + 1) * share]), {}) for i in range(jobs)]


def train_all(runs: Sequence[Run], slots: list[Slot], show: Callable[[list[Run]], None]) -> None:
    """Trains the runs that have not ended yet. A run that fails does not end the others.

    A run that was interrupted continues. One that failed is tried again; one that diverged would
    diverge again.

    Args:
        runs: in the order in which they start.
        slots: as many runs train at once.
        show: called with the runs that are training, several times a second and after each end.

    Raises:
        Stopped: a signal came; all runs have saved their states and ended.
    """
    waiting = [run for run in runs if run.outcome().state in ("waiting", "failed")]
    free, training, told = list(slots), list[_Training](), set[Path]()
    with _signals() as received:
        try:
            while waiting or training:
                # A sweep that was killed leaves a run that still saves its state, and another job
                # of an array may train one.
                busy = [run for run in waiting if files.is_locked(run.workdir / ".lock")]
                for run in [run for run in busy if run.folder not in told]:
                    told.add(run.folder)
                    print(f"{run.label} is trained by another process; waiting for it")
                ready = [run for run in waiting if run not in busy]
                while ready and free and not received:
                    run = ready.pop(0)
                    waiting.remove(run)
                    if run.folder in told and run.outcome().state in ("finished", "diverged"):
                        continue
                    try:
                        training.append(_Training(run, free[-1]))
                        free.pop()
                    except OSError as error:
                        _keep(run, Outcome("failed", f"{error.strerror}: {run.folder}"))
                if received:
                    break
                for ended in [each for each in training if each.process.poll() is not None]:
                    training.remove(ended)
                    free.append(ended.slot)
                    _keep(ended.run, ended.outcome())
                show([each.run for each in training])
                time.sleep(_POLL_SECONDS)
        finally:
            for each in training:
                each.process.terminate()
            for each in training:
                each.process.wait()
    if received:
        raise Stopped(received[0])


class _Training:
    """A run that is training."""

    def __init__(self, run: Run, slot: Slot):
        self.run, self.slot = run, slot
        run.prepare()
        parent = os.getpid()
        with open(run.folder / "log.txt", "ab") as log:
            self._log_start = log.tell()  # of this try
            self.process = subprocess.Popen(
                command(run),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | slot.environment,
                start_new_session=True,  # Ctrl-C comes to the sweep, which tells its runs
                preexec_fn=lambda: _at_start(slot.cores, parent),
            )

    def outcome(self) -> Outcome:
        """Returns how the process ended."""
        code = self.process.returncode
        if code == 0:
            return Outcome("finished")
        error = last_error(self.run.folder / "log.txt", self._log_start)
        if code == _DIVERGED:
            # The rest of the line names checkpoints, which depend on when the run was stopped.
            found = re.search(r"the [a-z ]+ not finite at step \d+", error)
            return Outcome("diverged", found[0] if found else error)
        if code < 0:
            error = f"killed by {signal.Signals(-code).name}"
        if shutil.disk_usage(self.run.folder).free < _FULL_BYTES:
            error += " (no room is left on the disk)"
        return Outcome("failed", error or f"exit code {code}")


def command(run: Run) -> list[str]:
    """Returns the command that trains a run."""
    script = Path(configs.__file__).parents[1] / "train.py"
    if not script.exists():
        raise UserError(f"there is no {script}", "Install by pip install -e . in a clone")
    return [
        sys.executable,
        str(script),
        f"--config={run.folder / 'config.json'}",
        f"--workdir={run.workdir}",
    ]


def last_error(log: Path, start: int = 0) -> str:
    """Returns the last line of a log that tells of an error, or its last line.

    Args:
        log: a text file.
        start: byte at which to begin.
    """
    text = log.read_bytes()[start:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1]


def _keep(run: Run, outcome: Outcome) -> None:
    """Keeps an outcome where the disk has room for it; the next command tries a run again."""
    try:
        run.write_outcome(outcome)
    except OSError as error:
        why = f" ({outcome.error})" if outcome.error else ""
        print(f"{run.label} {outcome.state}{why}, which could not be kept: {error.strerror}")


def _at_start(cores: frozenset[int], parent: int) -> None:
    """In a run's process: takes its cores, and ends when the sweep is killed."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, cores)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it was killed before this line
            os._exit(1)


def _cores() -> list[int]:
    """Returns the CPUs that this process may use."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@contextlib.contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """Yields a list to which SIGTERM and SIGINT are added when they come."""
    received: list[signal.Signals] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        received.append(signal.Signals(number))

    before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
