"""The faults: signals, full disks, and processes of which one ends."""

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
    LIMIT,
    PHASES,
    SHORT,
    Broken,
    Laboratory,
    Watched,
    check_start,
    compare,
    newest_saved,
)

Fault = tuple[str, int, Callable[[], float]]  # what, how often, and what makes it
STEPS = 440  # so many that signals run out first
# Seconds of a phase that may pass before a signal: about as many as it lasts.
DELAYS = {"preparation": 0.5, "compile": 3.0, "step": 0.3, "save": 0.1}
# Exit codes of a process that finds itself alone; 5 where it does so in a save.
ALONE = (1, 4, 5, -signal.SIGABRT)


def signals(lab: Laboratory, number: signal.Signals, times: int) -> Iterator[Fault]:
    """Sends a signal to one run, so many times, at random moments of random phases."""
    workdir, times = lab.directory / number.name, min(times, lab.most)
    data_dir = lab.directory / f"{number.name}-data"
    hits = Counter[str]()
    cold = {"JAX_COMPILATION_CACHE_DIR": str(lab.directory / f"{number.name}-cache")}

    def make() -> float:
        longest = 0.0
        saved = 0
        moments = [*DELAYS, *itertools.islice(itertools.cycle(PHASES[2:5]), times)][
            :times
        ]
        for phase in moments:
            where = cold if phase == "compile" else {}
            with lab.run(workdir, STEPS, data_dir=data_dir, **where) as run:
                run.until_phase(phase)
                end = time.monotonic() + lab.random.uniform(0, DELAYS[phase])
                run.until(lambda end=end: time.monotonic() > end)
                hits[strike(run, number, saved)] += 1
            longest, saved = max(longest, run.quiet), newest_saved(workdir)
        print(f"{number.name}: {dict(hits)}", flush=True)
        return max(longest, lab.finish(workdir, STEPS, saved, data_dir=data_dir))

    yield f"{number.name} at random moments", times, make


def strike(run: Watched, number: signal.Signals, saved: int) -> str:
    """Sends a signal, and returns the phase it came in.

    Broken: the run does not end as it should, or did not begin from step `saved`.
    """
    run.stop()  # or the phase could change while it is looked at
    hit = run.phase()
    shown = newest_saved(run.workdir)
    run.process.send_signal(number)
    run.process.send_signal(signal.SIGCONT)
    code = 128 + number
    codes = {signal.SIGKILL: [-number], signal.SIGINT: [code]}.get(
        number, [code, -number]
    )
    # Where no step is left, the run ends as it would have.
    run.wait(*codes, *([0] if hit == "report" and number != signal.SIGKILL else []))
    if hit not in ("start", "preparation"):
        check_start(run.workdir, saved)
    told = re.search(r"stopped by \w+ at step (\d+)", run.out.read_text())
    if number != signal.SIGKILL and hit in ("step", "save") and not told:
        raise Broken(
            f"{number.name} in {hit} did not stop it after its step: {run.err.read_text()!r}"
        )
    if newest_saved(run.workdir) < max(shown, int(told[1]) if told else 0):
        raise Broken(f"what was saved in {hit} is gone")
    return hit


@contextlib.contextmanager
def mounted(path: Path) -> Iterator[None]:
    """Mounts a small disk at a folder, which is created."""
    path.mkdir(exist_ok=True)
    options = ["-t", "tmpfs", "-o", "size=32m", "tmpfs"]
    subprocess.run(["mount", *options, path], check=True, capture_output=True)
    try:
        yield
    finally:
        # Lazily, because a thread of Orbax may still close a file.
        subprocess.run(["umount", "--lazy", path], check=True)


@contextlib.contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Leaves a disk no room while inside."""
    with (
        (disk / "filling").open("wb", buffering=0) as file,
        contextlib.suppress(OSError),
    ):
        while file.write(bytes(4096)):
            pass
    yield
    (disk / "filling").unlink()


def disks(lab: Laboratory) -> Iterator[Fault]:
    """Fills the disk of a run or of its prepared text. It takes root."""

    def check_told(run: Watched) -> None:
        told = re.findall(
            r"^warning: the state of step \d+ is not", run.err.read_text(), re.M
        )
        if (
            not told
            or f"error: The state of step {SHORT} is not saved"
            not in run.err.read_text()
        ):
            raise Broken(f"it does not tell of its saves: {run.err.read_text()!r}")

    def full_during_a_save(index: int) -> float:
        with mounted(disk := lab.directory / f"disk-{index}"):
            with lab.run(disk / disk.name, SHORT) as run:
                run.until_phase("save", saved=10)
                run.stop()
                saved = newest_saved(run.workdir)
                with filled(disk):
                    run.process.send_signal(signal.SIGCONT)
                    run.wait(5)
            check_told(run)
            return max(run.quiet, lab.finish(run.workdir, SHORT, saved))

    def full_during_preparation(index: int) -> float:
        disk = lab.directory / f"data-disk-{index}"
        workdir = lab.directory / f"unprepared-{index}"
        with mounted(disk):
            with lab.run(workdir, SHORT, data_dir=disk) as run:
                run.until_phase("preparation")
                run.stop()
                with filled(disk):
                    run.process.send_signal(signal.SIGCONT)
                    run.wait(2)
            return max(run.quiet, lab.finish(workdir, SHORT, data_dir=disk))

    for make, times in (full_during_a_save, 3), (full_during_preparation, 2):
        times = min(times, lab.most)
        what = f"a disk that is {make.__name__.replace('_', ' ')}"
        yield what, times, lambda make=make, times=times: max(map(make, range(times)))


def processes(lab: Laboratory) -> Iterator[Fault]:
    """Kills or stops one of two processes, while they compile and while they train."""

    @contextlib.contextmanager
    def pair(workdir: Path) -> Iterator[list[Watched]]:
        with socket.socket() as sock:
            sock.bind(("localhost", 0))
            port = sock.getsockname()[1]
        options = [f"--coordinator=localhost:{port}", "--num_processes=2"]
        options += ["--config.train.hang_seconds=20"]
        with contextlib.ExitStack() as stack:
            yield [
                stack.enter_context(
                    lab.run(workdir, SHORT, *options, f"--process_index={i}", process=i)
                )
                for i in range(2)
            ]

    def finish(workdir: Path) -> None:
        with pair(workdir) as runs:
            for run in runs:
                run.wait(0)

    reference = lab.directory / "pair"

    def harm(number: signal.Signals, index: int, phase: str) -> float:
        """Returns the seconds until the other process has ended."""
        if not reference.exists():
            finish(reference)
        workdir = lab.directory / f"pair-{number.name}-{index}-{phase}"
        with pair(workdir) as runs:
            runs[0].until_phase(phase, saved=10 if phase == "step" else 0)
            saved = newest_saved(workdir)
            seconds = []
            for run, signaled in (
                (runs[1 - index], number),
                (runs[index], signal.SIGCONT),
            ):
                runs[index].process.send_signal(signaled)
                began = time.monotonic()
                run.forget_quiet()
                run.wait(*ALONE, -number)
                seconds.append(time.monotonic() - began)
        if max(seconds) > LIMIT:
            raise Broken(
                f"process {index} in {phase}: it took {max(seconds):.0f} s to end"
            )
        finish(workdir)
        check_start(workdir, saved)
        compare(workdir, reference)
        return max(seconds)

    for number, what in (signal.SIGKILL, "killed"), (signal.SIGSTOP, "stopped"):
        moments = list(itertools.product((0, 1), ("step", "compile")))[: lab.most]

        def make(number=number, moments=moments):
            return max(harm(number, *m) for m in moments)

        yield f"one of two processes {what}", len(moments), make


KINDS: dict[str, Callable[[Laboratory], Iterator[Fault]]] = {
    "kill": partial(signals, number=signal.SIGKILL, times=10),
    "term": partial(signals, number=signal.SIGTERM, times=5),
    "int": partial(signals, number=signal.SIGINT, times=5),
    "disk": disks,
    "processes": processes,
}
