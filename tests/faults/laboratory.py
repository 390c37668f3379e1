"""Runs of train.py, watched from outside while faults are made, and compared with unharmed ones."""

import dataclasses
import os
import random
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.helpers import ROOT, TINY, metrics_of, params_of

PHASES = ("start", "preparation", "compile", "step", "validation", "save", "report")
SHORT = 40  # steps of a run
LIMIT = 60.0  # seconds in which a run must show something or end
_PAUSE = 0.003  # seconds from one look to the next
_ONE_DEVICE = "--xla_force_host_platform_device_count=1"
_EVAL_EVERY = 20
_OPTIONS = [
    *TINY,
    "--config.train.checkpoint_every=10",
    f"--config.train.eval_every={_EVAL_EVERY}",
    "--config.train.eval_batches=400",  # a third of a second
    "--config.train.keep_checkpoints=3",
]


class Broken(Exception):
    """What a run should have done, and did not."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What became of one kind of fault.

    Attributes:
        what: the fault.
        often: how often it was made.
        quiet: the longest time in which a run showed nothing, in seconds.
        problem: what a run should have done and did not; empty if all went well.
        tried: whether the machine allows this fault.
    """

    what: str
    often: str = ""
    quiet: float = 0.0
    problem: str = ""
    tried: bool = True

    def __str__(self) -> str:
        same = "**no**" if self.problem else "yes"
        cells = [self.what, self.often, same, f"{self.quiet:.0f} s"]
        if not self.tried:
            cells[1:] = ["not tried: needs root", "", ""]
        return f"| {' | '.join(cells)} |"


def attempt(what: str, often: object, make: Callable[[], float]) -> Row:
    """Makes a fault; `make` returns the longest time in which a run showed nothing."""
    try:
        return Row(what, str(often), make())
    except Broken as broken:
        return Row(what, str(often), problem=str(broken))
    except Exception:  # of the test itself: the other rows are worth having
        return Row(what, str(often), problem=traceback.format_exc())


class Watched:
    """A process of train.py whose screen goes to files; a context manager, which ends it.

    Attributes:
        workdir: of the run.
        process: of train.py.
        quiet: the longest time in which it neither wrote a line nor ended, in seconds.

    Args:
        workdir: of the run.
        data_dir: where its corpus is prepared.
        options: of the command.
        screen: the start of the paths of files that hold its screen.
        environment: variables beside this process's.
    """

    def __init__(
        self,
        workdir: Path,
        data_dir: Path,
        *options: str,
        screen: Path,
        **environment: str,
    ):
        self.workdir, self._data_dir = workdir, data_dir
        self._out, self._err = (screen.with_name(f"{screen.name}.{end}") for end in ("out", "err"))
        self._starts_before = len(starts_of(workdir))
        variables = {"GPT2_DATA_DIR": str(data_dir), "XLA_FLAGS": _ONE_DEVICE}
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "train.py", f"--workdir={workdir}", *options],
                cwd=ROOT,
                env=os.environ | variables | environment,
                stdout=out,
                stderr=err,
            )
        self.forget_quiet()

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()

    def stdout(self) -> str:
        """Returns what it has printed."""
        return self._out.read_text()

    def stderr(self) -> str:
        """Returns what it has printed as errors and warnings."""
        return self._err.read_text()

    def phase(self) -> str:
        """Returns one of PHASES, as its screen and its files tell."""
        if any((self.workdir / "checkpoints").glob("*tmp*")):
            return "save"
        screen = self.stdout()
        if "\n  workdir " not in screen:  # the last line of the first screen
            if len(starts_of(self.workdir)) > self._starts_before:
                return "compile"
            return "preparation" if any(self._data_dir.glob(".*.partial")) else "start"
        step, last, validated = self._shown()
        if step == last and (validated or starts_of(self.workdir)[-1] == last):
            return "report"
        return "validation" if step and step % _EVAL_EVERY == 0 and not validated else "step"

    def _shown(self) -> tuple[int, int, bool]:
        """Returns the newest step, the last of the run, and whether the newest is validated."""
        screen = self.stdout()
        last = int(re.search(r"^  steps +([\d,]+)", screen, re.M)[1].replace(",", ""))
        shown = re.findall(r"^step +(\d+)/\d+ \| (val )?loss", screen, re.M)
        step, validated = shown[-1] if shown else (starts_of(self.workdir)[-1], "val")
        return int(step), last, bool(validated)

    def newest_step(self) -> int:
        """Returns the newest step on its screen."""
        return self._shown()[0]

    def shows_steps(self) -> bool:
        """Returns whether it has printed a line of a step."""
        return "\nstep " in self.stdout()

    def forget_quiet(self) -> None:
        """Begins anew to note how long the process shows nothing."""
        self.quiet, self._size, self._since = 0.0, -1, time.monotonic()

    def look(self) -> None:
        """Notes how long the process has shown nothing.

        Raises:
            Broken: it was too long.
        """
        size, now = self._out.stat().st_size + self._err.stat().st_size, time.monotonic()
        self.quiet = max(self.quiet, now - self._since)
        if size != self._size:
            self._size, self._since = size, now
        if now - self._since > LIMIT:
            raise Broken(f"nothing in {LIMIT:.0f} s, in phase {self.phase()}: {self.stderr()!r}")

    def until(self, condition: Callable[[], bool]) -> bool:
        """Waits until something is true, and returns False if the process ends before."""
        while not condition():
            if self.process.poll() is not None:
                return False
            self.look()
            time.sleep(_PAUSE)
        return True

    def until_phase(self, phase: str, saved: int = 0) -> None:
        """Waits for a phase, with a checkpoint of step `saved` or later.

        Raises:
            Broken: the process ends before.
        """
        if not self.until(lambda: self.phase() == phase and newest_saved(self.workdir) >= saved):
            raise Broken(f"it ended before {phase}: {self.stderr()!r}")

    def until_step(self, step: int) -> None:
        """Waits for a line of a step or a later one.

        Raises:
            Broken: the process ends before.
        """
        if not self.until(lambda: self.shows_steps() and self.newest_step() >= step):
            raise Broken(f"it ended before step {step}: {self.stderr()!r}")

    def pause(self, seconds: float) -> None:
        """Waits so long, or until the process ends."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end)

    def stop(self) -> None:
        """Stops the process where it stands, so that its files hold still."""
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(0.01)

    def go_on(self) -> None:
        """Lets a stopped process go on."""
        self.process.send_signal(signal.SIGCONT)

    def wait(self, *codes: int) -> int:
        """Waits for the end and returns the exit code.

        Raises:
            Broken: the code is none of `codes`, or a traceback was printed.
        """
        self.until(lambda: False)
        self.look()
        code, told = self.process.returncode, self.stderr().strip()
        if code not in codes or "Traceback" in told:
            raise Broken(f"exit code {code} of {codes}: {told[-2000:]!r}")
        return code

    def wait_for_mistake(self) -> None:
        """Waits for the end, which must be a single line and exit code 2."""
        self.wait(2)
        if not re.fullmatch(r"(warning: .*\n)*error: .*\n", self.stderr()):
            raise Broken(f"no single line: {self.stderr()[-2000:]!r}")


class Laboratory:
    """A folder for runs and their texts.

    Attributes:
        directory: holds runs, texts and prepared texts.
        random: where moments come from.
        most: how often at most to make each fault.
        data_dir: prepared texts of runs whose texts are left alone.
    """

    def __init__(self, directory: Path, seed: int, most: int):
        self.directory, self.random, self.most = directory, random.Random(seed), most
        self.data_dir = directory / "data"
        self.corpus = self.write_corpus("corpus")
        self._screens = directory / "screens"
        self._screens.mkdir()

    def write_corpus(self, name: str) -> Path:
        """Writes a folder of texts, the same each time."""
        words = ["the", "of", "and", "to", "in", "that", "was", "his", "he", "it", "with", "is"]
        draw, folder = random.Random(0), self.directory / name
        folder.mkdir(parents=True)
        for number in range(30):
            (folder / f"{number:02}.txt").write_text(" ".join(draw.choices(words, k=8000)))
        return folder

    def run(
        self,
        workdir: Path,
        steps: int,
        *options: str,
        corpus: Path | None = None,
        data_dir: Path | None = None,
        screens: Path | None = None,
        process: int = 0,
        **environment: str,
    ) -> Watched:
        """Starts a run of so many steps, or one of its processes, with its screen in `screens`."""
        texts = f"--config.data.corpus=text:{corpus or self.corpus}/*.txt"
        options = (*_OPTIONS, texts, f"--config.train.num_steps={steps}", *options)
        screen = (screens or self._screens) / f"{workdir.name}-{process}"
        return Watched(workdir, data_dir or self.data_dir, *options, screen=screen, **environment)

    def unharmed(self, steps: int) -> Path:
        """Returns the workdir of a run without faults, with all its checkpoints."""
        workdir = self.directory / f"unharmed-{steps}"
        if not workdir.exists():
            with self.run(workdir, steps, "--config.train.keep_checkpoints=99") as run:
                run.wait(0)
        return workdir

    def finish(self, workdir: Path, steps: int, saved: int = 0, **kwargs) -> float:
        """Repeats a run's command to its end, and returns how long it showed nothing.

        Args:
            workdir: of the run.
            steps: that it has.
            saved: the newest checkpoint that it is known to have.
            kwargs: of `run`.

        Raises:
            Broken: it does not continue from `saved`, or does not end as the run without faults.
        """
        before = len(starts_of(workdir))
        with self.run(workdir, steps, **kwargs) as run:
            run.wait(0)
        if len(starts_of(workdir)) > before:  # a finished run does not start again
            check_start(workdir, saved)
        compare(workdir, self.unharmed(steps))
        return run.quiet


def check_start(workdir: Path, saved: int) -> None:
    """Raises Broken if the last start of a run went back behind a step that was saved."""
    if (start := starts_of(workdir)[-1]) < saved:
        raise Broken(f"step {saved} was saved, and the run went on from {start}")


def compare(workdir: Path, reference: Path) -> None:
    """Raises Broken unless two runs ended with the same parameters and metrics, bit for bit."""
    found, wanted = params_of(workdir), params_of(reference)
    others = [name for name in wanted if found[name].tobytes() != wanted[name].tobytes()]
    if others:
        raise Broken(f"other values in {', '.join(others[:3])}")
    names = ("step", "train/loss", "eval/loss")
    logged = [[tuple(map(m.get, names)) for m in metrics_of(each)] for each in (workdir, reference)]
    if logged[0] != logged[1]:
        raise Broken("other metrics than without faults")


def starts_of(workdir: Path) -> list[int]:
    """Returns the step from which each start of a run went on."""
    path = workdir / "environment.jsonl"
    text = path.read_text() if path.exists() else ""
    return [int(step) for step in re.findall(r'^{"step": (\d+)', text, re.M)]


def newest_saved(workdir: Path) -> int:
    """Returns the step of the newest checkpoint that a run shows, 0 if there is none."""
    names = [path.name for path in (workdir / "checkpoints").glob("*")]
    return max((int(name) for name in names if name.isdigit()), default=0)
