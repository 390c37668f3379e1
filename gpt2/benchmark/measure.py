"""Measures a case here and by peers in turn, and makes a table of the results."""

import contextlib
import json
import math
import os
import statistics
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gpt2 import launch
from gpt2.benchmark.turns import Player

OURS = "jax"


def measure(
    case: dict[str, Any],
    peers: list[str],
    rounds: int,
    seconds: float,
    variations: Mapping[str, dict[str, Any]] = MappingProxyType({}),
) -> dict[str, dict[str, Any]]:
    """Runs the case here and by the peers in turn, and returns the results by name.

    Args:
        case: from `make_case`.
        peers: of `PEERS[case["subject"]]`.
        variations: more contestants: this project with other options, by name.
        rounds: how many turns each has after its warm-up.
        seconds: the least length of a turn, without its first step, which does not count.
    """
    environment = launch.environment_to_measure()  # the same memory settings for all
    argument = json.dumps(case)
    commands = {OURS: ["gpt2.benchmark.worker", argument]}
    commands |= {peer: ["gpt2.benchmark.peers", peer, argument] for peer in peers}
    for name, options in variations.items():
        commands[name] = ["gpt2.benchmark.worker", json.dumps(case | {"vary": options})]
    players, steps = {}, {}
    with contextlib.ExitStack() as stack:
        for name, command in commands.items():
            command = [sys.executable, "-m", *command]
            players[name] = stack.enter_context(Player(name, command, environment))
            players[name].play(2)  # compiles, and fills caches
            steps[name] = max(1, math.ceil(seconds / players[name].play(1)[0]))
        medians: dict[str, list[float]] = {name: [] for name in players}
        for _ in range(rounds):
            for name, player in players.items():
                # The first step after the others' turns takes memory back from the machine.
                _, *times = player.play(1 + steps[name])
                medians[name].append(statistics.median(times))
        infos = {name: player.info() for name, player in players.items()}
    results = {}
    for name in players:
        # Peers compute what we do; a variation has FLOPs of its own.
        flops = infos[name if name in variations else OURS]["flops_per_token"]
        info = infos[OURS] | {"flops_per_token": flops}
        results[name] = infos[name] | summarise(case, medians[name], medians[OURS], info)
    return results


def summarise(
    case: dict[str, Any], turns: list[float], our_turns: list[float], our_info: dict[str, Any]
) -> dict[str, Any]:
    """Returns a contestant's figures, from the median step of each turn in seconds.

    `speedup` is how many times faster ours was than this one: median, least and most over the
    rounds.
    """
    step = statistics.median(turns)
    generated = case["subject"] == "generate"
    tokens = case["batch_size"] * case["context_length"] // (2 if generated else 1)
    peak = our_info["peak_flops"]
    speedups = [theirs / ours for theirs, ours in zip(turns, our_turns, strict=True)]
    return {
        "turns": turns,
        "step_seconds": step,
        "tokens_per_second": tokens / step,
        "mfu": tokens / step * our_info["flops_per_token"] / peak if peak else None,
        "speedup": [statistics.median(speedups), min(speedups), max(speedups)],
    }


def table(case: dict[str, Any], results: dict[str, dict[str, Any]]) -> str:
    """Returns the results as text for a terminal."""
    ours = results[OURS]
    by_name = dict(item for result in results.values() for item in result["versions"].items())
    versions = ", ".join(f"{name} {version}" for name, version in by_name.items())
    peak = ours["peak_flops"]
    peak_text = f"{peak / 1e9:,.0f} GFLOP/s, {ours['peak_source']}" if peak else "-"
    width = max(14, *(len(name) + 1 for name in results))
    lines = [
        f"{case['subject']} {case['model']}, {case['batch_size']} x {case['context_length']} "
        f"tokens, {case['compute']}, attention {ours['attention']}, remat {case['remat']}, "
        f"layers {'scanned' if case['scan_layers'] else 'unrolled'}",
        f"{ours['device']}, {os.cpu_count()} CPU cores, {versions}; peak: {peak_text}",
        f"compiled in {ours['compile_seconds']:.1f} s",
        "",
        " " * width + f"{'step ms':>10s}{'(least':>9s}{'most)':>9s}{'tokens/s':>12s}{'MFU':>6s}"
        f"{'memory GB':>11s}" + ("  jax is faster by" if len(results) > 1 else ""),
    ]
    for name, result in results.items():
        mfu = f"{result['mfu']:.0%}" if result["mfu"] else "-"
        median, least, most = result["speedup"]
        speedup = "" if name == OURS else f"  {median:.2f} ({least:.2f} to {most:.2f})"
        lines.append(
            f"{name:{width}s}{1e3 * result['step_seconds']:10,.1f}"
            f"{1e3 * min(result['turns']):9,.1f}{1e3 * max(result['turns']):9,.1f}"
            f"{result['tokens_per_second']:12,.0f}{mfu:>6s}"
            f"{result['peak_bytes'] / 1e9:11.2f}{speedup}"
        )
    if ours["shares"]:
        shares = ", ".join(f"{scope} {share:.0%}" for scope, share in ours["shares"].items())
        lines += ["", f"time by part: {shares}"]
    return "\n".join(lines)
