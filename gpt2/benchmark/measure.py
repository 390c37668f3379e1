"""Measures a case here and by peers in turn, after it has seen that both sides compute the same."""

import contextlib
import functools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from scipy.special import stdtrit

from gpt2.benchmark.first_step import Agreement, FirstStep, compare, first_difference
from gpt2.benchmark.turns import Player, environment_of_players
from gpt2.errors import UserError, tell

OURS = "jax"
COMPARED = ("train", "eval")  # subjects whose first step is compared before it is timed


def measure(
    case: dict[str, Any],
    peers: list[str],
    rounds: int,
    seconds: float,
    variations: Mapping[str, dict[str, Any]] = MappingProxyType({}),
) -> dict[str, dict[str, Any]]:
    """Runs the case here and by the peers in turn, and returns the results by name.

    Args:
        case: from `make_cases`.
        peers: of `PEERS[case["subject"]]`.
        variations: more contestants: this project with other options, by name.
        rounds: how many turns each has after its warm-up.
        seconds: the least length of a turn, without its first step, which does not count.

    Raises:
        UserError: a peer does not compute what this project computes, or a contestant ends early.
    """
    if peers and case["subject"] in COMPARED and case["compute"] != "float32":
        _compare_in_float32(json.dumps(_in_float32(case)), tuple(peers))
    compared = [OURS, *peers] if peers and case["subject"] in COMPARED else []
    players: dict[str, Player] = {}
    steps, warm_up, longer = {}, {}, {}
    runs_on: dict[str, dict[str, str]] = {}
    with contextlib.ExitStack() as stack:
        shown = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        commands = _commands(case, peers, variations)
        for name, command in commands.items():
            _say(f"{name}: starts, compiles and warms up")
            began = time.perf_counter()
            player = players[name] = stack.enter_context(_start(name, command, len(commands)))
            runs_on[name] = player.runs_on()
            _require_same_hardware(name, peers, runs_on)
            first = player.show(shown / f"{name}.npz") if name in compared else None
            if first is not None and name != OURS:
                _refuse_difference(name, _compare(shown, name))
            again, _ = player.play(2)  # compiles if that was not done, and fills caches
            steps[name] = max(1, math.ceil(seconds / (usual := player.play(1)[0])))
            longer[name] = max(0.0, (again if first is None else first) - usual)
            warm_up[name] = {"warm_up_seconds": time.perf_counter() - began}
        medians: dict[str, list[float]] = {name: [] for name in players}
        for turn in range(1, rounds + 1):
            _say(f"turn {turn} of {rounds}")
            for name, player in players.items():
                # The first step after the others' turns takes memory back from the machine.
                _, *times = player.play(1 + steps[name])
                medians[name].append(statistics.median(times))
        infos = {name: player.info() for name, player in players.items()}
    results = {}
    for name in players:
        # Peers compute what we do; a variation has FLOPs of its own, and may have another peak.
        info = infos[name if name in variations else OURS]
        results[name] = runs_on[name] | warm_up[name] | infos[name]
        results[name] |= summarise(case, medians[name], medians[OURS], info)
        # Before the first step, and in it: the contestants compile at either time.
        results[name]["compile_seconds"] = infos[name].get("compile_seconds", 0.0) + longer[name]
        results[name]["compared"] = name in compared
        results[name]["vary"] = variations.get(name, {})
    return results


def verify(case: dict[str, Any], peers: list[str]) -> Iterator[tuple[str, list[Agreement]]]:
    """Yields, for each peer, how its first training step compares with this project's."""
    runs_on: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, command in _commands(case, peers, {}).items():
            _say(f"{name}: first steps in {case['compute']}, to be compared")
            with _start(name, command, 1) as player:
                runs_on[name] = player.runs_on()
                _require_same_hardware(name, peers, runs_on)
                player.show(Path(directory) / f"{name}.npz")
            if name != OURS:
                yield name, _compare(Path(directory), name)


def _say(text: str) -> None:
    """Tells a person at a terminal what takes so long. Nothing redraws, which would take time."""
    if sys.stderr.isatty():
        tell(text)


def _in_float32(case: dict[str, Any]) -> dict[str, Any]:
    """Returns the case of two sequences in full float32. There are no flash kernels for it."""
    attention = "eager" if case["attention"] == "eager" else "sdpa"
    exact = dict(compute="float32", matmul_precision="highest", attention=attention)
    return case | exact | dict(batch_size=min(2, case["batch_size"]), with_data=False, shares=False)


@functools.cache
def _compare_in_float32(case: str, peers: tuple[str, ...]) -> None:
    """Raises a UserError if a peer differs in float32, where 16 bits would hide the difference.

    A compiled peer is compared without its compiler, which would take minutes once more.

    Args:
        case: as JSON. A case is compared once.
        peers: their names.
    """
    eager = list(dict.fromkeys(peer.removesuffix("_compile") for peer in peers))
    for name, agreements in verify(json.loads(case), eager):
        _refuse_difference(name, agreements)


def _require_same_hardware(
    name: str, peers: list[str], runs_on: Mapping[str, Mapping[str, str]]
) -> None:
    """Raises a UserError if a contestant runs on other hardware than a comparison allows.

    A peer uses one device. Beside peers this project therefore has to, too.

    Args:
        name: the contestant.
        peers: those of the comparison.
        runs_on: what each contestant so far runs on, this project's first.
    """
    ours, theirs = runs_on[OURS], runs_on[name]
    if peers and not ours["device"].startswith("1 x "):
        raise UserError(
            f"{OURS} runs on {ours['device']}, and a peer on one device",
            "Show one device: set CUDA_VISIBLE_DEVICES=0, or on a CPU unset XLA_FLAGS",
        )
    if name in peers and theirs["platform"] != ours["platform"]:
        raise UserError(
            f"{name} runs on {theirs['device']}, and {OURS} on {ours['device']}",
            f"Install PyTorch and JAX for the same hardware, or leave out --peers={name}",
        )
    if name in peers and ours["platform"] == "gpu" and theirs["device"] != ours["device"]:
        raise UserError(
            f"{name} runs on {theirs['device']}, and {OURS} on {ours['device']}",
            "Show both one GPU: set CUDA_VISIBLE_DEVICES=0",
        )


def refusal(name: str, difference: Agreement) -> UserError:
    """Returns the error for a peer that does not compute what this project computes."""
    return UserError(
        f"{name} does not compute what {OURS} computes: {difference}",
        f"Look for what differs, or leave out --peers={name}",
    )


def _refuse_difference(name: str, agreements: list[Agreement]) -> None:
    if difference := first_difference(agreements):
        raise refusal(name, difference)


def _compare(shown: Path, name: str) -> list[Agreement]:
    ours, theirs = (FirstStep.load(shown / f"{which}.npz") for which in (OURS, name))
    return list(compare(ours, theirs))


def _commands(
    case: dict[str, Any], peers: list[str], variations: Mapping[str, dict[str, Any]]
) -> dict[str, list[str]]:
    """Returns the module and the arguments of each contestant, ours first."""
    argument = json.dumps(case)
    commands = {OURS: ["gpt2.benchmark.worker", argument]}
    commands |= {peer: ["gpt2.benchmark.peers", peer, argument] for peer in peers}
    for name, options in variations.items():
        commands[name] = ["gpt2.benchmark.worker", json.dumps(case | {"vary": options})]
    return commands


def _start(name: str, command: list[str], contestants: int) -> Player:
    environment = environment_of_players(contestants)
    return Player(name, [sys.executable, "-m", *command], environment)


def summarise(
    case: dict[str, Any], turns: list[float], our_turns: list[float], our_info: dict[str, Any]
) -> dict[str, Any]:
    """Returns a contestant's figures, from the median step of each turn in seconds.

    `speedup` is how many times faster ours was than this one, as `ratio` gives it.
    """
    step = statistics.median(turns)
    generated = case["subject"] == "generate"
    tokens = case["batch_size"] * case["context_length"] // (2 if generated else 1)
    peak = our_info["peak_flops"]
    return {
        "turns": turns,
        "step_seconds": step,
        "tokens_per_second": tokens / step,
        "mfu": tokens / step * our_info["flops_per_token"] / peak if peak else None,
        "speedup": ratio(turns, our_turns),
    }


def ratio(turns: list[float], our_turns: list[float]) -> list[float | None]:
    """Returns the mean ratio of turns, and its 95 % interval: low and high.

    Turns of one round form a pair. The interval is Student's, of the mean logarithm; with a single
    round there is none.
    """
    logs = np.log(np.array(turns) / np.array(our_turns))
    middle, count = logs.mean(), len(logs)
    if count == 1:
        return [float(np.exp(middle)), None, None]
    half = stdtrit(count - 1, 0.975) * logs.std(ddof=1) / math.sqrt(count)
    return [float(np.exp(middle + sign * half)) for sign in (0, -1, 1)]
