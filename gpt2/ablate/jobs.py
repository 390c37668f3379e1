"""Trains the runs of a sweep, several at once, each in a process of its own."""

import contextlib
import ctypes
import dataclasses
import os
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
    if gpus and os.environ.get("JAX_PLATFORMS") != "cpu":
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
    free, training = list(slots), list[_Training]()
    with _signals() as received:
        try:
            while waiting or training:
                while waiting and free and not received:
                    run = waiting.pop(0)
                    if outcome := _begin(run):
                        _keep(run, outcome)
                    else:
                        training.append(_Training(run, free.pop()))
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
        with open(run.folder / "log.txt", "ab") as log:
            self.process = subprocess.Popen(
                [*command(run)],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | slot.environment,
                start_new_session=True,  # Ctrl-C comes to the sweep, which tells its runs
                preexec_fn=lambda: _at_start(slot.cores),
            )

    def outcome(self) -> Outcome:
        """Returns how the process ended."""
        code = self.process.returncode
        if code == 0:
            return Outcome("finished")
        error = last_error(self.run.folder / "log.txt") or f"exit code {code}"
        return Outcome("diverged" if code == _DIVERGED else "failed", error)


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


def last_error(log: Path) -> str:
    """Returns the last line of a log that tells of an error, or its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1]


def _begin(run: Run) -> Outcome | None:
    """Prepares a run's folder. Returns its outcome if that fails."""
    try:
        run.prepare()
        (run.folder / "log.txt").touch()
        if run.workdir.exists():
            # A sweep that was killed leaves a run that still saves its state.
            with files.locked(run.workdir / ".lock"):
                pass
    except OSError as error:
        return Outcome("failed", f"{error.strerror}: {error.filename}")
    return None


def _keep(run: Run, outcome: Outcome) -> None:
    """Keeps an outcome where the disk has room for it; the next command tries a run again."""
    with contextlib.suppress(OSError):
        run.write_outcome(outcome)


def _at_start(cores: frozenset[int]) -> None:
    """In a run's process: takes its cores, and ends when the sweep is killed."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, cores)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


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
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return visible.split(",")
    if not shutil.which("nvidia-smi"):
        return []
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    return [str(i) for i in range(len(listed.stdout.splitlines()))]
