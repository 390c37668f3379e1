"""The faults: signals, full disks, and the end of one of two processes."""

import contextlib
import itertools
import re
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.programs.faults.laboratory import (
    PHASES,
    SHORT,
    Broken,
    Laboratory,
    Watched,
    check_start,
    compare,
    newest_saved,
)

# A description, the number of times that the fault is made, and the function that makes it.
Fault = tuple[str, int, Callable[[], None]]
STEPS = 440  # more than a run takes before the last signal
# The longest time from the begin of a phase to a signal, in seconds: about the length of the phase.
DELAYS = {"preparation": 0.5, "compile": 3.0, "step": 0.3, "save": 0.1}
# Exit codes of a process after the other process has ended (5 during a save), and the time limit in
# seconds for its end.
ALONE = (1, 4, 5, -signal.SIGABRT)
ALONE_SECONDS = 60


def signals(lab: Laboratory, number: signal.Signals, times: int) -> Iterator[Fault]:
    """Send a signal to one run several times, at random moments of random phases."""
    workdir = lab.directory / number.name
    times = min(times, lab.most)
    data_dir = lab.directory / f"{number.name}-data"
    hits = Counter[str]()
    cold = {"JAX_COMPILATION_CACHE_DIR": str(lab.directory / f"{number.name}-cache")}

    def make() -> None:
        saved = 0
        phases = itertools.chain(DELAYS, itertools.cycle(PHASES[2:5]))
        for phase in itertools.islice(phases, times):
            where = cold if phase == "compile" else {}
            with lab.run(workdir, STEPS, data_dir=data_dir, **where) as run:
                run.until_phase(phase)
                end = time.monotonic() + lab.random.uniform(0, DELAYS[phase])
                run.until(lambda end=end: time.monotonic() > end)
                hits[strike(run, number, saved)] += 1
            saved = newest_saved(workdir)
        print(f"{number.name}: {dict(hits)}", flush=True)
        lab.finish(workdir, STEPS, saved, data_dir=data_dir)

    yield f"{number.name} at random moments", times, make


def strike(run: Watched, number: signal.Signals, saved: int) -> str:
    """Send a signal, and return the phase of the run at that moment.

    Raise Broken if the run does not end as it should, or began before step `saved`.
    """
    run.stop()  # otherwise the phase could change while it is read
    hit = run.phase()
    last = newest_saved(run.workdir)
    run.process.send_signal(number)
    run.process.send_signal(signal.SIGCONT)
    codes = {-number}
    if number == signal.SIGINT:
        codes = {128 + number}
    if number == signal.SIGTERM:
        codes.add(128 + number)
    if hit == "report" and number != signal.SIGKILL:
        codes.add(0)  # no step is left, so the run may end normally
    run.wait(*codes)
    if hit not in ("start", "preparation"):
        check_start(run.workdir, saved)
    stopped = re.search(r"stopped by \w+ at step (\d+)", run.out.read_text())
    if stopped:
        last = max(last, int(stopped[1]))
    elif number != signal.SIGKILL and hit in ("step", "save"):
        raise Broken(f"{number.name} in {hit} did not stop the run after its step")
    if newest_saved(run.workdir) < last:
        raise Broken(f"a checkpoint that was saved before {hit} is missing")
    return hit


@contextlib.contextmanager
def mounted(path: Path) -> Iterator[Path]:
    """Create a folder, and mount a small disk at it."""
    path.mkdir(exist_ok=True)
    options = ["-t", "tmpfs", "-o", "size=32m", "tmpfs"]
    subprocess.run(["mount", *options, path], check=True, capture_output=True)
    try:
        yield path
    finally:
        # Unmount lazily, because a thread of Orbax may still close a file.
        subprocess.run(["umount", "--lazy", path], check=True)


@contextlib.contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Leave no space on a disk during the body."""
    filling = disk / "filling"
    with filling.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    yield
    filling.unlink()


def disks(lab: Laboratory) -> Iterator[Fault]:
    """Fill the disk of a run or of its prepared text. Only root can mount such a disk."""

    def full_during_a_save(disk: Path) -> None:
        with lab.run(disk / disk.name, SHORT) as run:
            run.until_phase("save", saved=10)
            run.stop()
            saved = newest_saved(run.workdir)
            with filled(disk):
                run.process.send_signal(signal.SIGCONT)
                run.wait(5)
        for message in ("warning: The state of step ", "error: The state of step "):
            if message not in run.err.read_text():
                raise Broken(
                    f"the run does not report a failed save: {run.err.read_text()!r}"
                )
        lab.finish(run.workdir, SHORT, saved)

    def full_during_preparation(disk: Path) -> None:
        workdir = lab.directory / f"{disk.name}-run"
        with lab.run(workdir, SHORT, data_dir=disk) as run:
            run.until_phase("preparation")
            run.stop()
            with filled(disk):
                run.process.send_signal(signal.SIGCONT)
                run.wait(2)
        lab.finish(workdir, SHORT, data_dir=disk)

    def repeat(fill: Callable[[Path], None], times: int) -> None:
        for index in range(times):
            with mounted(lab.directory / f"{fill.__name__}-{index}") as disk:
                fill(disk)

    for fill, times in ((full_during_a_save, 3), (full_during_preparation, 2)):
        times = min(times, lab.most)
        what = f"a disk that is {fill.__name__.replace('_', ' ')}"
        yield what, times, partial(repeat, fill, times)


def processes(lab: Laboratory) -> Iterator[Fault]:
    """Kill or stop one of two processes, while they compile and while they train."""

    @contextlib.contextmanager
    def pair(workdir: Path) -> Iterator[list[Watched]]:
        with socket.socket() as sock:
            sock.bind(("localhost", 0))
            port = sock.getsockname()[1]
        options = [f"--coordinator=localhost:{port}", "--num_processes=2"]
        options += ["--config.train.hang_seconds=20"]

        def run(index: int) -> Watched:
            options_of_one = [*options, f"--process_index={index}"]
            return lab.run(workdir, SHORT, *options_of_one, process=index)

        with run(0) as first, run(1) as second:
            yield [first, second]

    def finish(workdir: Path) -> None:
        with pair(workdir) as runs:
            for run in runs:
                run.wait(0)

    reference = lab.directory / "pair"

    def harm(number: signal.Signals, index: int, phase: str) -> None:
        if not reference.exists():
            finish(reference)
        workdir = lab.directory / f"pair-{number.name}-{index}-{phase}"
        with pair(workdir) as runs:
            runs[0].until_phase(phase, saved=10 if phase == "step" else 0)
            saved = newest_saved(workdir)
            harmed = runs.pop(index)
            harmed.process.send_signal(number)
            (other,) = runs
            other.wait(*ALONE, limit=ALONE_SECONDS)
            harmed.process.send_signal(signal.SIGCONT)
            harmed.wait(*ALONE, -number, limit=ALONE_SECONDS)
        finish(workdir)
        check_start(workdir, saved)
        compare(workdir, reference)

    moments = list(itertools.product((0, 1), ("step", "compile")))[: lab.most]

    def repeat(number: signal.Signals) -> None:
        for index, phase in moments:
            harm(number, index, phase)

    for number, what in ((signal.SIGKILL, "killed"), (signal.SIGSTOP, "stopped")):
        yield f"one of two processes {what}", len(moments), partial(repeat, number)


KINDS: dict[str, Callable[[Laboratory], Iterator[Fault]]] = {
    "kill": partial(signals, number=signal.SIGKILL, times=10),
    "term": partial(signals, number=signal.SIGTERM, times=5),
    "int": partial(signals, number=signal.SIGINT, times=5),
    "disk": disks,
    "processes": processes,
}
