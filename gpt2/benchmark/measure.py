"""Times a case here, beside peers and with other options, in turn.

Each side runs in a process of its own, which sleeps until its turn comes: what takes short turns
runs under the same load, heat and clocks, so that ratios compare what ran seconds apart.
"""

import contextlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import scipy.stats

from gpt2.benchmark.first_steps import TOLERANCES, compare
from gpt2.benchmark.tables import Row
from gpt2.config import Config, read_option, with_options
from gpt2.errors import UserError
from gpt2.utils import launch

OURS = "jax"
PEERS = ("torch", "torch_compile")


class Case(NamedTuple):
    """What a side trains: a config whose vocabulary is resolved."""

    config: Config
    xla_flags: str = ""  # of its environment
    python: str = sys.executable

    def varied(self, text: str) -> "Case":
        """Returns the case with `OPTION=VALUE,...` of the config, or XLA_FLAGS, set."""
        if text.startswith("XLA_FLAGS="):
            flags = f"{os.environ.get('XLA_FLAGS', '')} {text.partition('=')[2]}"
            return self._replace(xla_flags=flags)
        options = {}
        for setting in re.split(r",(?=[a-z]+\.\w+=)", text):
            name, _, value = setting.partition("=")
            options[name] = read_option(name, value)
        config = with_options(self.config, options)
        return self._replace(config=config)


class Player:
    """A process that serves turns, until it is closed."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str]
    ):
        self.name = name
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.device: str = self._read()  # such as `1 x cpu`

    def ask(self, request: int | str) -> Any:
        """Returns the answer to a request: see `serve`."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, as `_read` finds
            text = json.dumps(request)
            print(text, file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout
        answer = self._process.stdout.readline()
        if answer:
            return json.loads(answer)
        code = self._process.wait()
        if code > 0:
            sys.exit(code)  # it has told why
        raise UserError(
            f"{self.name} ended early, by signal {-code}", "It may lack memory"
        )

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


class Work(Protocol):
    """What a side does."""

    device: str

    def step(self) -> None:
        """Takes a training step, and waits for it."""

    def first_losses(self) -> list[float]:
        """Returns the losses of the first steps from drawn weights, in nats per token."""

    def info(self) -> Row:
        """Returns what there is to report beside times."""


def serve(work: Work) -> None:
    """Tells the device, then answers each line of standard input until it closes.

    A number asks for as many steps of `work`, and the answer is the seconds of each. A word asks
    for the losses of its first steps, and 0 for what there is to report beside times.
    """
    print(json.dumps(work.device), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any
        if isinstance(request, str):
            answer = work.first_losses()
        elif request == 0:
            answer = work.info()
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
    players: dict[str, Player] = {}
    steps: dict[str, int] = {}
    turns: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        for name, each in cases.items():
            player = _start(name, each, len(cases))
            stack.callback(player.close)
            players[name] = player
            *_, usual = player.ask(3)  # the first compiles if that was not done
            steps[name] = 1 + int(seconds / usual)
            turns[name] = []
        _compare_sides(players, cases[OURS].config.precision.compute)
        for _ in range(rounds):
            for name, player in players.items():
                # The first step after the others' turns takes memory back from the machine.
                _, *times = player.ask(1 + steps[name])
                turns[name].append(statistics.median(times))
        infos = [player.ask(0) for player in players.values()]
    rows = []
    for name, info in zip(players, infos, strict=True):
        config = cases[name].config
        step = statistics.median(turns[name])
        tokens_per_second = config.tokens_per_step / step
        flops = info.pop("flops_per_token", None)
        peak = info.pop("peak_flops", None)
        compared = None
        if name != OURS:
            compared = ratio(turns[name], turns[OURS])
        row = {
            "name": name,
            "device": players[name].device,
            "turns": turns[name],  # seconds of the median step of each
            "step_seconds": step,
            "tokens_per_second": tokens_per_second,
            "mfu": tokens_per_second * flops / peak if peak else None,
            "ratio": compared,
            "batch_size": config.shapes.largest.batch_size,
            "context_length": config.shapes.largest.context_length,
            "compute": config.precision.compute,
        }
        rows.append(row | info)
    return rows


def _compare_sides(players: Mapping[str, Player], compute: str) -> None:
    """Raises a UserError unless peers run where we do, and compute the same."""
    ours = players[OURS]
    tolerance = TOLERANCES[compute]
    if compute == "float32" and not ours.device.endswith("cpu"):
        tolerance = TOLERANCES["float16"]
    for name in players.keys() & PEERS:
        peer = players[name]
        if peer.device != ours.device:
            raise UserError(
                f"{name} runs on {peer.device}, and {OURS} on {ours.device}",
                "Install both for the same hardware, and show one device: CUDA_VISIBLE_DEVICES=0",
            )
        our_losses = ours.ask("first losses")
        wrong = compare(our_losses, peer.ask("first losses"), tolerance)
        if wrong:
            raise UserError(
                f"{name} does not compute what {OURS} computes: {wrong}",
                "Choose options that plain GPT-2 has, or leave out --peers",
            )


def ratio(turns: Sequence[float], our_turns: Sequence[float]) -> list[float]:
    """Returns how many times as long turns took as ours did, and the 95 % interval: low and high.

    It is Student's, of the mean logarithm of rounds; with a single round there is none.
    """
    ratios = np.array(turns) / our_turns
    logs = np.log(ratios)
    middle = logs.mean()
    if len(logs) == 1:
        return [math.exp(middle)]
    interval = scipy.stats.ttest_1samp(logs, 0.0).confidence_interval()
    return [math.exp(log) for log in (middle, *interval)]


def _start(name: str, case: Case, number: int) -> Player:
    """Starts a side, one of `number`.

    On a GPU, JAX takes three quarters of the memory when it starts, and a second process would
    find none. So each gets its part of nine tenths, unless the user has said how much.
    """
    module = ["gpt2.benchmark.ours"]
    if name in PEERS:
        module = ["gpt2.benchmark.peers", name]
    config = json.dumps(case.config.to_dict())
    command = [case.python, "-m", *module, config]
    environment = launch.environment_to_measure()
    environment.setdefault("XLA_CLIENT_MEM_FRACTION", f"{0.9 / number:.2f}")
    if case.xla_flags:
        environment["XLA_FLAGS"] = case.xla_flags
    print(f"{name}: starts and compiles", file=sys.stderr)
    return Player(name, command, environment)
