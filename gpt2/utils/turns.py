"""Programs that take turns: each in a process of its own, kept alive, one at work at a time.

Processes that compare speeds side by side in time see the same weather: other load, heat, clocks.
The one that waits sleeps on its standard input.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from gpt2.errors import UserError


def serve(work: Callable[[], Any], info: Callable[[], dict[str, Any]]) -> None:
    """Does as many steps as each line of standard input asks for, until it closes.

    Args:
        work: does one step and waits for it.
        info: what there is to tell beside times, asked for by 0 steps.
    """
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
        print(json.dumps(seconds or info()), flush=True)


class Player:
    """A process that serves turns; a context manager, which ends it.

    Args:
        name: for messages.
        command: what to run.
        environment: its variables.
    """

    def __init__(self, name: str, command: list[str], environment: dict[str, str]):
        self.name = name
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, env=environment, text=True
        )

    def play(self, steps: int) -> list[float]:
        """Has it do `steps` steps, 1 or more, and returns the seconds of each.

        Raises:
            UserError: it ended instead; why is above on standard error.
            SystemExit: it ended by a user's mistake, which it has told.
        """
        return self._ask(steps)

    def info(self) -> dict[str, Any]:
        """Returns what it has to tell beside times."""
        return self._ask(0)

    def _ask(self, steps: int) -> Any:
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            if self._process.wait() == UserError.exit_code:
                sys.exit(UserError.exit_code)
            raise UserError(f"{self.name} ended early", "Its own message above says why")
        return json.loads(answer)

    def __enter__(self) -> "Player":
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
