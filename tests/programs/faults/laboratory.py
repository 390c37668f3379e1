"""Runs of train.py that are watched during faults, and compared with runs without faults."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gpt2.training.checkpoint_files import latest_step
from tests.helpers import (
    ROOT,
    TINY,
    metrics_of,
    params_of,
    starts_of,
    write_words,
)

PHASES = ("start", "preparation", "compile", "step", "save", "report")
SHORT = 40  # number of steps of a short run
LIMIT = 600.0  # seconds after which a run counts as hanging
_PAUSE = 0.003  # seconds between checks
# With these options, a validation takes a third of a second.
_OPTIONS = """
    --config.train.checkpoint_every=10 --config.train.keep_checkpoints=3
    --config.train.eval_every=20 --config.train.eval_batches=400"""
_OPTIONS = (*TINY, *_OPTIONS.split())


class Broken(Exception):
    """The error for a run that does not behave as it should."""


class Watched:
    """A process of train.py, as a context manager that ends the process.

    Attributes:
        workdir: the workdir of the run.
        process: the process of the run.
        out, err: the files to which standard output and standard error are written.
    """

    def __init__(
        self, workdir: Path, data_dir: Path, *options: str, screen: Path, **variables
    ):
        self.workdir = workdir
        self._data_dir = data_dir
        self.out = screen.with_name(f"{screen.name}.out")
        self.err = screen.with_name(f"{screen.name}.err")
        self._starts_before = len(starts_of(workdir))
        variables |= {"GPT2_DATA_DIR": str(data_dir), "PYTHONPATH": str(ROOT)}
        variables["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
        with self.out.open("w") as out, self.err.open("w") as err:
            command = [sys.executable, "train.py", f"--workdir={workdir}", *options]
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | variables, stdout=out, stderr=err
            )

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()

    def phase(self) -> str:
        """Return the run's phase, one of PHASES, according to its files and its output."""
        if any((self.workdir / "checkpoints").glob("*tmp*")):
            return "save"
        if len(starts_of(self.workdir)) == self._starts_before:
            return "preparation" if any(self._data_dir.glob(".*.partial")) else "start"
        # Until a run prints its first step, it may still be opening files, and any signal ends it.
        begun = re.compile(r"^steps +\d+ to (\d+).*^step ", re.M | re.S)
        if not (shown := begun.search(self.out.read_text())):
            return "compile"
        return "report" if latest_step(self.workdir) == int(shown[1]) else "step"

    def until(self, condition: Callable[[], bool], limit: float = LIMIT) -> None:
        """Wait for a condition or the end of the run. Raise Broken if that takes too long."""
        deadline = time.monotonic() + limit
        while self.process.poll() is None and not condition():
            if time.monotonic() > deadline:
                raise Broken(f"the run hangs in {self.phase()}")
            time.sleep(_PAUSE)

    def until_phase(self, phase: str, saved: int = 0) -> None:
        """Wait for a phase after the step `saved` has been saved."""
        self.until(
            lambda: newest_saved(self.workdir) >= saved and self.phase() == phase
        )

    def stop(self) -> None:
        """Stop the process until it receives SIGCONT."""
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(0.01)

    def wait(self, *codes: int, limit: float = LIMIT) -> None:
        """Wait for the end. Raise Broken for other exit codes than `codes`, or for a traceback."""
        self.until(lambda: False, limit)
        code = self.process.returncode
        text = self.err.read_text()
        if code not in codes or "Traceback" in text:
            raise Broken(f"exit code {code}, not one of {codes}: {text[-2000:]!r}")


class Laboratory:
    """A folder for runs and their texts. Each fault is made at most `most` times."""

    def __init__(self, directory: Path, seed: int, most: int):
        self.directory = directory
        self.random = random.Random(seed)
        self.most = most
        self.data_dir = directory / "data"
        self._screens = directory / "screens"
        self._screens.mkdir()
        pattern = write_words(directory / "corpus", 30, 8000)
        self._corpus = f"--config.data.corpus=text:{pattern}"

    def run(self, workdir: Path, steps: int, *options: str, **where) -> Watched:
        """Start a run. `where` may contain `data_dir`, `process` and environment variables."""
        options = (
            *_OPTIONS,
            self._corpus,
            f"--config.train.num_steps={steps}",
            *options,
        )
        screen = self._screens / f"{workdir.name}-{where.pop('process', 0)}"
        data_dir = where.pop("data_dir", self.data_dir)
        return Watched(workdir, data_dir, *options, screen=screen, **where)

    def unharmed(self, steps: int) -> Path:
        """Return the workdir of a run without faults, with all its checkpoints."""
        workdir = self.directory / f"unharmed-{steps}"
        if not workdir.exists():
            with self.run(workdir, steps, "--config.train.keep_checkpoints=99") as run:
                run.wait(0)
        return workdir

    def finish(self, workdir: Path, steps: int, saved: int = 0, **where) -> None:
        """Repeat a run's command to its end.

        Raise Broken if the run does not continue from step `saved` or a later step, or if it does
        not end in the same way as the run without faults.
        """
        before = len(starts_of(workdir))
        with self.run(workdir, steps, **where) as run:
            run.wait(0)
        if len(starts_of(workdir)) > before:  # a finished run does not start again
            check_start(workdir, saved)
        compare(workdir, self.unharmed(steps))


def check_start(workdir: Path, saved: int) -> None:
    """Raise Broken if the last start of a run continued from a step before `saved`."""
    if (start := starts_of(workdir)[-1]) < saved:
        raise Broken(f"step {saved} was saved, but the run continued from step {start}")


def compare(workdir: Path, reference: Path) -> None:
    """Raise Broken unless two runs ended with the same parameters and metrics, bit for bit."""
    found = params_of(workdir)
    for name, values in params_of(reference).items():
        if found[name].tobytes() != values.tobytes():
            raise Broken(f"the values of {name} differ from the run without faults")
    if metrics_of(workdir, speed=False) != metrics_of(reference, speed=False):
        raise Broken("the metrics differ from the run without faults")


def newest_saved(workdir: Path) -> int:
    """Return the step of the newest complete checkpoint of a run, or 0 if there is none."""
    return latest_step(workdir) or 0
