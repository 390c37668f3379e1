"""Times a case here, beside peers and with other options, in turn.

Each side runs in a process of its own, which sleeps until its turn comes: what takes short turns
runs under the same load, heat and clocks, so that ratios compare what ran seconds apart. A peer is
timed only once its first steps are seen to compute what ours compute.
"""

import contextlib
import dataclasses
import json
import math
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats

from gpt2 import launch
from gpt2.benchmark.first_step import Agreement, compare
from gpt2.config import Config, read_option, with_options
from gpt2.errors import UserError

OURS = "jax"
Row = dict[str, Any]
_MEMORY = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@dataclasses.dataclass(frozen=True)
class Case:
    """What a side does: `train` or `generate`, by a config whose vocabulary is resolved."""

    subject: str
    config: Config
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of its environment

    def varied(self, text: str) -> "Case":
        """Returns the case with `OPTION=VALUE,...` of the config, or XLA_FLAGS, set."""
        if text.startswith("XLA_FLAGS="):
            flags = f"{os.environ.get('XLA_FLAGS', '')} {text.partition('=')[2]}"
            return dataclasses.replace(self, variables={"XLA_FLAGS": flags})
        settings = [setting.partition("=") for setting in text.split(",")]
        options = {name: read_option(name, value) for name, _, value in settings}
        return dataclasses.replace(self, config=with_options(self.config, options))

    def in_float32(self) -> "Case":
        """Returns the case of two sequences in full float32."""
        options = {"data.batch_size": 2, "precision.compute": "float32"}
        options["train.accumulate_steps"] = min(2, self.config.train.accumulate_steps)
        variables = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}  # which our peers read, too
        return Case(self.subject, with_options(self.config, options), variables)


class Player:
    """A process that serves turns. It is a context manager, which ends the process."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]):
        self.name = name
        pipe = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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
        raise UserError(f"{self.name} ended early, by signal {-code}", "It may lack memory")

    def __enter__(self) -> "Player":
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def serve(device: str, work: Any, info: Callable[[], Row]) -> None:
    """Tells the device, then answers each line of standard input until it closes.

    Args:
        device: what the process runs on.
        work: a number asks for as many of its steps: the seconds of each. A path asks for a file
            of what its first steps compute: the seconds of the first.
        info: 0 asks for what there is to report beside times.
    """
    print(json.dumps(device), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, str):
            answer, shown = work.first_steps()
            Path(request).write_bytes(pickle.dumps(shown))
        elif request == 0:
            answer = info()
        else:
            clock = [time.perf_counter()]
            for _ in range(request):
                work.step()
                clock.append(time.perf_counter())
            answer = np.diff(clock).tolist()
        print(json.dumps(answer), flush=True)


def measure(
    case: Case,
    peers: Sequence[str] = (),
    variations: Mapping[str, Case] | None = None,
    *,
    rounds: int,
    seconds: float,
) -> list[Row]:
    """Runs the case here, by peers and with variations in turn; returns a row for each, ours first.

    Each has `rounds` turns of at least `seconds`.
    """
    if peers and case.config.precision.compute != "float32":  # 16 bits would hide differences
        for name, agreements in verify(case.in_float32(), ["torch"]):
            _refuse_difference(name, agreements)
    cases = {OURS: case} | dict.fromkeys(peers, case) | dict(variations or {})
    rows: dict[str, Row] = {}
    with contextlib.ExitStack() as stack:
        shown = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        players: dict[str, Player] = {}
        for name, each in cases.items():
            _say(f"{name}: starts, compiles and warms up")
            player = stack.enter_context(_start(name, each, peers, len(cases)))
            players[name] = _on_same_device(player, players)
            first = 0.0
            if peers and (name == OURS or name in peers):
                first = player.ask(str(shown / name))
                _refuse_difference(name, _compare(shown, name))
            again, _ = player.ask(2)  # compiles if that was not done, and fills caches
            (usual,) = player.ask(1)
            steps = max(1, math.ceil(seconds / usual))
            rows[name] = {"first": (first or again) - usual, "steps": steps, "turns": []}
        for turn in range(1, rounds + 1):
            _say(f"turn {turn} of {rounds}")
            for name, player in players.items():
                # The first step after the others' turns takes memory back from the machine.
                _, *times = player.ask(1 + rows[name]["steps"])
                rows[name]["turns"].append(statistics.median(times))
        infos = {name: player.ask(0) for name, player in players.items()}
    about = {"subject": case.subject, "device": players[OURS].device, "cpu_cores": os.cpu_count()}
    return [
        {"name": name} | about | _figures(each, rows[name], rows[OURS]["turns"], infos[name])
        for name, each in cases.items()
    ]


def _figures(case: Case, row: Row, our_turns: list[float], info: Row) -> Row:
    config, step = case.config, statistics.median(row["turns"])
    tokens = config.tokens_per_step // (2 if case.subject == "generate" else 1)
    flops, peak = (info.pop(key, None) for key in ("flops_per_token", "peak_flops"))
    return {
        "turns": row["turns"],  # seconds of the median step of each
        "step_seconds": step,
        "tokens_per_second": tokens / step,
        "mfu": tokens / step * flops / peak if peak else None,
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
    logs = np.log(np.array(turns) / np.array(our_turns))
    if len(logs) == 1:
        return np.exp(logs).tolist()
    half = scipy.stats.t.ppf(0.975, len(logs) - 1) * scipy.stats.sem(logs)
    return np.exp(logs.mean() + np.array([0, -half, half])).tolist()


def verify(case: Case, peers: Sequence[str]) -> Iterator[tuple[str, list[Agreement]]]:
    """Yields, for each peer, how its first training steps compare with this project's."""
    players: dict[str, Player] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name in (OURS, *peers):
            _say(f"{name}: first steps in {case.config.precision.compute}, to be compared")
            with _start(name, case, peers, 1) as player:
                players[name] = _on_same_device(player, players)
                player.ask(str(Path(directory) / name))
            if name != OURS:
                yield name, _compare(Path(directory), name)


def _compare(shown: Path, name: str) -> list[Agreement]:
    return list(compare(*(pickle.loads((shown / side).read_bytes()) for side in (OURS, name))))


def _refuse_difference(name: str, agreements: Sequence[Agreement]) -> None:
    for each in agreements:
        if not each.holds:
            what = f"{name} does not compute what {OURS} computes: {each}"
            raise UserError(what, "Choose options that plain GPT-2 has, or leave out --peers")


def _start(name: str, case: Case, peers: Sequence[str], number: int) -> Player:
    """Starts a side, one of `number`.

    On a GPU, JAX takes three quarters of the memory when it starts, and a second process would
    find none. So each gets its part of nine tenths, unless the user has said how much.
    """
    module = ["gpt2.benchmark.peers", name] if name in peers else ["gpt2.benchmark.ours"]
    command = [sys.executable, "-m", *module, case.subject, json.dumps(case.config.to_dict())]
    share = {} if any(map(os.environ.get, _MEMORY)) else {_MEMORY[0]: f"{0.9 / number:.2f}"}
    return Player(name, command, launch.environment_to_measure() | share | dict(case.variables))


def _on_same_device(player: Player, others: Mapping[str, Player]) -> Player:
    if others and player.device != others[OURS].device:
        raise UserError(
            f"{player.name} runs on {player.device}, and {OURS} on {others[OURS].device}",
            "Install both for the same hardware, and show one device: CUDA_VISIBLE_DEVICES=0",
        )
    return player


def _say(text: str) -> None:
    if sys.stderr.isatty():  # tells a person what takes so long
        print(text, file=sys.stderr, flush=True)
