"""Time training steps in turn: the step of a config, the same step in PyTorch, and variations.

Each of these steps is called a side, and has its own process, which sleeps between its turns.
Because turns are short, all sides run under the same load, heat and clocks, and ratios compare
steps that ran seconds apart.
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
from gpt2.errors import UserError, log
from gpt2.lab.benchmark.first_steps import STEPS, TOLERANCES, compare
from gpt2.lab.benchmark.tables import Row
from gpt2.utils import launch

OURS = "jax"
PEERS = ("torch", "torch_compile")


class Case(NamedTuple):
    """A training step to measure: its config, its XLA flags, and the Python that runs it."""

    # Its `model.vocab_size` must not be 0, because random token ids are drawn below this size.
    config: Config
    xla_flags: str = ""
    python: str = sys.executable

    def varied(self, text: str) -> "Case":
        """Return the case with the settings in `text`: `OPTION=VALUE,...` or `XLA_FLAGS=...`.

        XLA flags are added to the flags of the environment. Raise a UserError if `text` sets
        `data.tokenizer`, because the vocabulary of a case is fixed.
        """
        if text.startswith("XLA_FLAGS="):
            flags = f"{os.environ.get('XLA_FLAGS', '')} {text.partition('=')[2]}"
            return self._replace(xla_flags=flags)
        options = {}
        for setting in re.split(r",(?=[a-z]+\.\w+=)", text):
            name, _, value = setting.partition("=")
            options[name] = read_option(name, value)
        if "data.tokenizer" in options:
            raise UserError(
                f"--vary={text} sets data.tokenizer, but all variations share one tokenizer",
                "Vary model.vocab_size, or run the command once for each tokenizer",
            )
        config = with_options(self.config, options)
        return self._replace(config=config)


class Player(NamedTuple):
    """A handle of a process that runs the methods of a `Side` on request.

    A side is a training step to measure. The process ends when the handle is closed.
    """

    name: str
    process: subprocess.Popen[str]

    def ask(self, method: str, *arguments: int) -> Any:
        """Call the method of the `Side` with the name `method`, and return its result.

        If the process fails, exit with its exit code. If it was killed, or ended without an answer,
        raise a UserError.
        """
        assert self.process.stdout
        # The pipe is broken if the process has ended, which is handled below.
        with contextlib.suppress(BrokenPipeError):
            request = json.dumps([method, *arguments])
            print(request, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if answer:
            return json.loads(answer)
        code = self.process.wait()
        if code > 0:
            sys.exit(code)  # the process has printed its error
        end = f"was killed by signal {-code}" if code else "ended without an answer"
        raise UserError(
            f"The process of {self.name} {end}",
            "If memory ran out, use a smaller --config.data.batch_size",
        )

    def close(self) -> None:
        """Close the standard input of the process, which then ends, and wait for its end."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


class Side(abc.ABC):
    """The interface of a training step that is measured in a process of its own.

    The parent process calls the methods through a `Player`.
    """

    @abc.abstractmethod
    def info(self) -> Row:
        """Return the `device`, such as `1 x cpu`, and other values for the row of results."""

    @abc.abstractmethod
    def draw_batch(self, number: int) -> Any:
        """Draw the batch with the index `number`, and place it on the device.

        Batch `number` has the same tokens on every side.
        """

    @abc.abstractmethod
    def draw_weights(self) -> None:
        """Reset the training state, with initial weights that are the same on every side."""

    @abc.abstractmethod
    def step(self, batch: Any) -> float:
        """Take a training step, wait for it, and return the loss in nats per token."""

    def first_losses(self) -> list[float]:
        """Reset the weights, take the first `STEPS` steps, and return their losses.

        The losses come from the same compiled step that is timed.
        """
        self.draw_weights()
        return [self.step(self.draw_batch(number)) for number in range(STEPS)]

    def times(self, number: int) -> list[float]:
        """Take `number` steps on one batch, and return the seconds of each step."""
        batch = self.draw_batch(0)
        clock = [time.perf_counter()]
        for _ in range(number):
            self.step(batch)
            clock.append(time.perf_counter())
        return np.diff(clock).tolist()

    def serve(self) -> None:
        """Call the methods that standard input requests, until it closes.

        Each line of standard input is a JSON list: the name of a method, and its arguments. The
        method's result is written to standard output as a line of JSON.
        """
        for line in sys.stdin:
            method, *arguments = json.loads(line)
            answer = getattr(self, method)(*arguments)
            print(json.dumps(answer), flush=True)


def measure(cases: Mapping[str, Case], *, rounds: int, seconds: float) -> list[Row]:
    """Measure cases (training steps) in turn, and return a row of results for each case.

    `cases` maps names to cases. Cases whose names are in `PEERS` run in PyTorch, and all other
    cases in JAX. One name must be `OURS`: the time of every other case is divided by the time of
    this case. In each of `rounds` rounds, every case takes steps for about `seconds` seconds.
    """
    players: dict[str, Player] = {}
    steps: dict[str, int] = {}
    turns: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        for name, each in cases.items():
            player = _start(name, each, len(cases))
            stack.callback(player.close)
            players[name] = player
            # Only the last of the three steps is used, because the first may include compilation.
            *_, usual = player.ask("times", 3)
            steps[name] = 1 + int(seconds / usual)
            turns[name] = []
        _compare_sides(players, cases[OURS].config.precision.compute)
        for _ in range(rounds):
            for name, player in players.items():
                # The first step of a turn is slower, because the other sides have used the caches.
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
            "turns": turns[name],  # median seconds of a step in each turn
            "step_seconds": step,
            "tokens_per_second": tokens_per_second,
            "mfu": tokens_per_second / peak if peak else None,
            "ratio": compared,
        }
        rows.append(row | info)
    return rows


def _compare_sides(players: Mapping[str, Player], compute: str) -> None:
    """Raise a UserError if PyTorch and JAX use different devices or compute different losses.

    `players` maps names of training steps to their processes. Each step whose name is in `PEERS` is
    compared with the step `OURS`. `compute` is the option `precision.compute`, which determines how
    much losses may differ.
    """
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
                f"{name} runs on {device}, but {OURS} runs on {our_device}",
                "Install JAX and PyTorch for the same device, and set CUDA_VISIBLE_DEVICES=0",
            )
        our_losses = ours.ask("first_losses")
        wrong = compare(our_losses, peer.ask("first_losses"), tolerance)
        if wrong:
            raise UserError(
                f"{name} does not compute what {OURS} computes: {wrong}",
                "Use only options of plain GPT-2, or leave out --peers",
            )


def ratio(turns: Sequence[float], our_turns: Sequence[float]) -> list[float]:
    """Return the time of a step divided by the time of our step, and this ratio's 95 % interval.

    `turns` and `our_turns` are the seconds of a step in each round. The result is a list: the
    geometric mean of the rounds' ratios, and the two ends of Student's t interval, computed from
    the logarithms of the ratios. With a single round, the list contains only the ratio.
    """
    ratios = np.array(turns) / our_turns
    logs = np.log(ratios)
    middle = logs.mean()
    if len(logs) == 1:
        return [math.exp(middle)]
    interval = scipy.stats.ttest_1samp(logs, 0.0).confidence_interval()
    return [math.exp(log) for log in (middle, *interval)]


def _start(name: str, case: Case, number: int) -> Player:
    """Start the process that measures the training step of `case`, one of `number` processes.

    On a GPU, JAX would allocate three quarters of the memory when it starts, and leave too little
    for a second process. Each process that runs JAX may therefore allocate 90 % of the memory,
    divided by `number`, unless the user has set XLA_CLIENT_MEM_FRACTION.
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
    log(f"{name}: starting and compiling")
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return Player(name, process)
