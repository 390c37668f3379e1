"""One of two processes that is killed or stopped."""

import contextlib
import itertools
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from tests.faults.laboratory import (
    LIMIT,
    SHORT,
    Broken,
    Laboratory,
    Row,
    Watched,
    attempt,
    check_start,
    compare,
    newest_saved,
)

# Exit codes of a process that finds itself alone; 5 where it does so in a save.
_ENDS = (1, 4, 5, -signal.SIGABRT)


def processes(lab: Laboratory) -> Iterator[Row]:
    """Harms the first and the second process, while they compile and while they train."""
    reference = lab.directory / "pair"
    finish(lab, reference)
    for number, what in (signal.SIGKILL, "killed"), (signal.SIGSTOP, "stopped (SIGSTOP)"):
        moments = list(itertools.product((0, 1), ("step", "compile")))[: lab.most]

        def make(number: signal.Signals = number, moments: list = moments) -> float:
            return max(harm(lab, reference, number, *moment) for moment in moments)

        yield attempt(f"one of two processes {what}", len(moments), make)


def harm(lab: Laboratory, reference: Path, number: signal.Signals, index: int, phase: str) -> float:
    """Harms process `index` and returns the seconds until the other has ended."""
    workdir = lab.directory / f"pair-{number.name}-{index}-{phase}"
    with pair(lab, workdir) as runs:
        runs[0].until_phase(phase, saved=10 if phase == "step" else 0)
        saved = newest_saved(workdir)
        seconds = []
        for run, signaled in (runs[1 - index], number), (runs[index], signal.SIGCONT):
            runs[index].process.send_signal(signaled)
            began = time.monotonic()
            run.forget_quiet()
            run.wait(*_ENDS, -number)
            seconds.append(time.monotonic() - began)
            if seconds[-1] > LIMIT:
                raise Broken(f"process {index} in {phase}: it took {seconds[-1]:.0f} s to end")
    finish(lab, workdir)
    check_start(workdir, saved)
    compare(workdir, reference)
    return max(seconds)


@contextlib.contextmanager
def pair(lab: Laboratory, workdir: Path) -> Iterator[list[Watched]]:
    """Starts both processes of a run, and ends them."""
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


def finish(lab: Laboratory, workdir: Path) -> None:
    """Runs both processes to their end."""
    with pair(lab, workdir) as runs:
        for run in runs:
            run.wait(0)
