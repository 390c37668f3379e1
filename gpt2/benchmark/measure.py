"""Times a case here, beside peers and with other options, in turn.

Each side runs in a process of its own, which sleeps until its turn comes: what takes short turns
runs under the same load, heat and clocks, so that ratios compare what ran seconds apart.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.stats

from gpt2.benchmark.first_steps import FirstSteps, compare
from gpt2.config import Config, read_option, with_options
from gpt2.errors import UserError
from gpt2.utils import launch

OURS = "jax"
PEERS = ("torch", "torch_compile")
Row = dict[str, Any]
_MEMORY = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@dataclasses.dataclass(frozen=True)
class Case:
    """What a side trains: a config whose vocabulary is resolved."""

    config: Config
    variables: Mapping[str, str] = dataclasses.field(
        default_factory=dict
    )  # of its environment

    def varied(self, text: str) -> "Case":
        """Returns the case with `OPTION=VALUE,...` of the config, or XLA_FLAGS, set."""
        if text.startswith("XLA_FLAGS="):
            flags = f"{os.environ.get('XLA_FLAGS', '')} {text.partition('=')[2]}"
            return dataclasses.replace(self, variables={"XLA_FLAGS": flags})
        settings = [
            setting.partition("=") for setting in re.split(r",(?=[a-z]+\.\w+=)", text)
        ]
        options = {name: read_option(name, value) for name, _, value in settings}
        return dataclasses.replace(self, config=with_options(self.config, options))


class Player:
    """A process that serves turns, until it is closed."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str]
    ):
        self.name = name
        pipe: Any = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._process: Any = subprocess.Popen(command, env=dict(environment), **pipe)
        self.device: str = self._read()  # such as `1 x cpu`

    def ask(self, request: int | str) -> Any:
        """Returns the answer to a request: see `serve`."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, as `_read` finds
            print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> Any:
        if answer := self._process.stdout.readline():
            return json.loads(answer)
        if (code := self._process.wait()) > 0:
            sys.exit(code)  # it has told why
        raise UserError(
            f"{self.name} ended early, by signal {-code}", "It may lack memory"
        )

    def close(self) -> None:
        """Ends the process."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def serve(device: str, work: Any, info: Callable[[], Row]) -> None:
    """Tells the device, then answers each line of standard input until it closes.

    A number asks for as many steps of `work`, and the answer is the seconds of each. A word asks
    for what its first steps compute, and 0 for what there is to report beside times.
    """
    print(json.dumps(device), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, str):
            answer: Any = work.first_steps()
        elif request == 0:
            answer = info()
        else:
            clock = [time.perf_counter()]
            for _ in range(request):
                work.step()
                clock.append(time.perf_counter())
            answer = np.diff(clock).tolist()
        print(json.dumps(answer), flush=True)


def measure(cases: Mapping[str, Case], *, rounds: int, seconds: float) -> list[Row]:
    """Runs cases by name in turn, `OURS` and `PEERS` among them, and returns a row for each.

    Each has `rounds` turns of at least `seconds`.
    """
    rows = dict[str, Row]()
    players = dict[str, Player]()
    reference = None
    with contextlib.ExitStack() as stack:
        for name, each in cases.items():
            player = _start(name, each, len(cases), players)
            stack.callback(player.close)
            first, _, usual = player.ask(3)  # the first compiles if that was not done
            if name == OURS and {*cases} & {*PEERS}:
                reference = FirstSteps(*player.ask("first steps"))
            if reference and name in PEERS:
                wrong = compare(reference, FirstSteps(*player.ask("first steps")))
                what = f"{name} does not compute what {OURS} computes: {wrong}"
                if wrong:
                    raise UserError(
                        what,
                        "Choose options that plain GPT-2 has, or leave out --peers",
                    )
            steps = max(1, math.ceil(seconds / usual))
            rows[name] = {"first": first - usual, "steps": steps, "turns": []}
        for _ in range(rounds):
            for name, player in players.items():
                # The first step after the others' turns takes memory back from the machine.
                _, *times = player.ask(1 + rows[name]["steps"])
                rows[name]["turns"].append(statistics.median(times))
        infos = {name: player.ask(0) for name, player in players.items()}
    device = players[OURS].device
    ours = rows[OURS]["turns"]
    return [
        {"name": name, "device": device} | _figures(each, rows[name], ours, infos[name])
        for name, each in cases.items()
    ]


def _figures(case: Case, row: Row, our_turns: list[float], info: Row) -> Row:
    config = case.config
    step = statistics.median(row["turns"])
    tokens_per_second = config.tokens_per_step / step
    flops, peak = (info.pop(key, None) for key in ("flops_per_token", "peak_flops"))
    return {
        "turns": row["turns"],  # seconds of the median step of each
        "step_seconds": step,
        "tokens_per_second": tokens_per_second,
        "mfu": tokens_per_second * flops / peak if peak else None,
        "compile_seconds": info.pop("compile_seconds", 0.0) + max(0.0, row["first"]),
        "ratio": ratio(row["turns"], our_turns),
        "batch_size": config.data.batch_size,
        "context_length": config.model.context_length,
        "compute": config.precision.compute,
    } | info


def ratio(turns: Sequence[float], our_turns: Sequence[float]) -> list[float]:
    """Returns how many times as long turns took as ours did, and the 95 % interval: low and high.

    It is Student's, of the mean logarithm of rounds; with a single round there is none.
    """
    logs = np.log(np.array(turns) / our_turns)
    if len(logs) == 1:
        return np.exp(logs).tolist()
    half = scipy.stats.t.ppf(0.975, len(logs) - 1) * scipy.stats.sem(logs)
    return np.exp(logs.mean() + np.array([0, -half, half])).tolist()


def _start(name: str, case: Case, number: int, players: dict[str, Player]) -> Player:
    """Starts a side, one of `number`, and adds it to the players.

    On a GPU, JAX takes three quarters of the memory when it starts, and a second process would
    find none. So each gets its part of nine tenths, unless the user has said how much.
    """
    module = (
        ["gpt2.benchmark.peers", name] if name in PEERS else ["gpt2.benchmark.ours"]
    )
    command = [sys.executable, "-m", *module, json.dumps(case.config.to_dict())]
    share = (
        {} if any(map(os.environ.get, _MEMORY)) else {_MEMORY[0]: f"{0.9 / number:.2f}"}
    )
    if sys.stderr.isatty():  # a person wonders what takes so long
        print(
            f"{name}: starts and compiles, {case.config.precision.compute}",
            file=sys.stderr,
        )
    environment = launch.environment_to_measure() | share | dict(case.variables)
    player = players[name] = Player(name, command, environment)
    if player.device != players[OURS].device:
        raise UserError(
            f"{name} runs on {player.device}, and {OURS} on {players[OURS].device}",
            "Install both for the same hardware, and show one device: CUDA_VISIBLE_DEVICES=0",
        )
    return player
