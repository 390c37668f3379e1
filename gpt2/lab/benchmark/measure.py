"""Times a case here, beside peers and with other options, in turn.

Each side runs in a process of its own, which sleeps until its turn comes: what takes short turns
runs under the same load, heat and clocks, so that ratios compare what ran seconds apart.
"""

import abc
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
from typing import Any, NamedTuple

import numpy as np
import scipy.stats

from gpt2.config import Config, read_option, with_options
from gpt2.errors import UserError
from gpt2.lab.benchmark.first_steps import STEPS, TOLERANCES, compare
from gpt2.lab.benchmark.tables import Row
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


class Player(NamedTuple):
    """A process that serves turns, until it is closed."""

    name: str
    process: subprocess.Popen[str]

    def ask(self, method: str, *arguments: int) -> Any:
        """Returns what a method of its `Side` does."""
        assert self.process.stdout
        with contextlib.suppress(BrokenPipeError):  # it has ended, as is found below
            request = json.dumps([method, *arguments])
            print(request, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if answer:
            return json.loads(answer)
        code = self.process.wait()
        if code > 0:
            sys.exit(code)  # it has told why
        raise UserError(
            f"{self.name} ended early, by signal {-code}", "It may lack memory"
        )

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


class Side(abc.ABC):
    """A training step and its state, in a process that a `Player` asks."""

    @abc.abstractmethod
    def info(self) -> Row:
        """Returns its `device`, such as `1 x cpu`, and what there is to report beside times."""

    @abc.abstractmethod
    def draw_batch(self, number: int) -> Any:
        """Returns a batch on the device, the same on every side."""

    @abc.abstractmethod
    def draw_weights(self) -> None:
        """Begins anew, from weights that are the same on every side."""

    @abc.abstractmethod
    def step(self, batch: Any) -> float:
        """Takes a training step, waits for it, and returns the loss in nats per token."""

    def first_losses(self) -> list[float]:
        """Returns the losses of the first steps, by the very program that is timed."""
        self.draw_weights()
        return [self.step(self.draw_batch(number)) for number in range(STEPS)]

    def times(self, number: int) -> list[float]:
        """Returns the seconds of each of so many steps on the same batch."""
        batch = self.draw_batch(0)
        clock = [time.perf_counter()]
        for _ in range(number):
            self.step(batch)
            clock.append(time.perf_counter())
        return np.diff(clock).tolist()

    def serve(self) -> None:
        """Answers each line of standard input, a method and its arguments, until it closes."""
        for line in sys.stdin:
            method, *arguments = json.loads(line)
            answer = getattr(self, method)(*arguments)
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
            *_, usual = player.ask(
                "times", 3
            )  # the first compiles if that was not done
            steps[name] = 1 + int(seconds / usual)
            turns[name] = []
        _compare_sides(players, cases[OURS].config.precision.compute)
        for _ in range(rounds):
            for name, player in players.items():
                # The first step after the others' turns takes memory back from the machine.
                _, *times = player.ask("times", 1 + steps[name])
                turns[name].append(statistics.median(times))
        infos = {name: player.ask("info") for name, player in players.items()}
    rows = []
    for name, info in infos.items():
        config = cases[name].config
        step = statistics.median(turns[name])
        tokens_per_second = config.tokens_per_step / step
        peak = info.pop("peak_tokens_per_second", None)
        compared = None
        if name != OURS:
            compared = ratio(turns[name], turns[OURS])
        row = {
            "name": name,
            "turns": turns[name],  # seconds of the median step of each
            "step_seconds": step,
            "tokens_per_second": tokens_per_second,
            "mfu": tokens_per_second / peak if peak else None,
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
    our_device = ours.ask("info")["device"]
    tolerance = TOLERANCES[compute]
    if compute == "float32" and not our_device.endswith("cpu"):
        tolerance = TOLERANCES["float16"]
    for name in players.keys() & PEERS:
        peer = players[name]
        device = peer.ask("info")["device"]
        if device != our_device:
            raise UserError(
                f"{name} runs on {device}, and {OURS} on {our_device}",
                "Install both for the same hardware, and show one device: CUDA_VISIBLE_DEVICES=0",
            )
        our_losses = ours.ask("first_losses")
        wrong = compare(our_losses, peer.ask("first_losses"), tolerance)
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
    module = ["gpt2.lab.benchmark.ours"]
    if name in PEERS:
        module = ["gpt2.lab.benchmark.peers", name]
    config = json.dumps(case.config.to_dict())
    command = [case.python, "-m", *module, config]
    environment = launch.environment_to_measure()
    environment.setdefault("XLA_CLIENT_MEM_FRACTION", f"{0.9 / number:.2f}")
    if case.xla_flags:
        environment["XLA_FLAGS"] = case.xla_flags
    print(f"{name}: starts and compiles", file=sys.stderr)
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return Player(name, process)
