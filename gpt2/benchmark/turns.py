"""Programs that take turns: each in a process of its own, kept alive, one at work at a time.

Processes that take short turns run under the same conditions: other load, heat, clocks. A process
that waits for its turn sleeps on its standard input.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpt2 import launch
from gpt2.errors import UserError

_MEMORY = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def announce(platform: str, device: str, count: int = 1) -> None:
    """Tells the other end, before anything else, what this process runs on.

    Args:
        platform: 'cpu', 'gpu' or 'tpu'.
        device: the name of one device.
        count: how many of them the work uses.
    """
    print(json.dumps({"platform": platform, "device": f"{count} x {device}"}), flush=True)


def serve(
    work: Callable[[], Any],
    info: Callable[[], dict[str, Any]],
    show: Callable[[Path], float] | None = None,
) -> None:
    """Does as many steps as each line of standard input asks for, until it closes.

    Args:
        work: does one step and waits for it.
        info: returns what there is to report beside times, in answer to a line of 0.
        show: does first steps, writes what they computed to a file and returns the seconds of the
            first, in answer to a line that names the file; None: no line does.
    """
    for line in sys.stdin:
        request, seconds = json.loads(line), []
        if isinstance(request, str):
            assert show, "this program has nothing to show"
            seconds = [show(Path(request))]
        else:
            seconds = [_seconds(work) for _ in range(request)]
        print(json.dumps(seconds or info()), flush=True)


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def environment_of_players(number: int) -> dict[str, str]:
    """Returns the variables of each of `number` processes that are there at once.

    The memory settings are the same for all. On a GPU, JAX takes three quarters of the memory when
    it starts, and a second process would find none. So each gets its part of nine tenths, unless
    the user has said how much.
    """
    share = {} if any(map(os.environ.get, _MEMORY)) else {_MEMORY[0]: f"{0.9 / number:.2f}"}
    return launch.environment_to_measure() | share


class Player:
    """A process that serves turns. It is a context manager, which ends the process.

    Args:
        name: for messages.
        command: what to run.
        environment: its variables.
    """

    def __init__(self, name: str, command: list[str], environment: dict[str, str]):
        self.name = name
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True)
        assert process.stdin and process.stdout  # they are pipes
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout

    def runs_on(self) -> dict[str, str]:
        """Returns what the process announced before anything else: platform and device."""
        return self._read()

    def play(self, steps: int) -> list[float]:
        """Lets the process do `steps` steps, 1 or more, and returns the seconds of each.

        Raises:
            UserError: it ended early; its own message on standard error says why.
            SystemExit: it ended by a user's mistake, which it has printed.
        """
        return self._ask(steps)

    def show(self, path: Path) -> float:
        """Lets the process do first steps and write what they computed.

        Returns:
            Seconds of the first step.
        """
        (seconds,) = self._ask(str(path))
        return seconds

    def info(self) -> dict[str, Any]:
        """Returns what the process reports beside times."""
        return self._ask(0)

    def _ask(self, request: int | str) -> Any:
        with contextlib.suppress(BrokenPipeError):  # it has ended, as `_read` finds
            self._stdin.write(f"{json.dumps(request)}\n")
            self._stdin.flush()
        return self._read()

    def _read(self) -> Any:
        answer = self._stdout.readline()
        if not answer:
            if self._process.wait() == UserError.EXIT_CODE:
                sys.exit(UserError.EXIT_CODE)
            raise UserError(f"{self.name} ended early", "Its own message above tells the reason")
        return json.loads(answer)

    def __enter__(self) -> "Player":
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._process.wait()
        self._stdout.close()
