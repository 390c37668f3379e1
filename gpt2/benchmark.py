"""How fast a step is, alone or beside PyTorch's: `python -m gpt2.benchmark train --peers=torch`.

    python -m gpt2.benchmark train --model=gpt2-124m --batch_size=2 --compute=bfloat16 \\
        --peers=torch,torch_compile

A step of `train` is one of training; of `eval`, the loss of a batch; of `generate`, greedy
continuations of a batch of prompts, which fill half of the context, to its end; of `data`, a batch
of text read for training.

Everyone runs in a process of its own and all take turns, A B A B, so that a ratio compares what ran
seconds apart. Warm-up, the first step of a turn, compilation and data loading are outside the
times; clipping and AdamW are inside. All use the device's default precision for the compute type,
and dropout is 0.

`train` spreads over all devices, `eval` and `generate` run on one.

MFU is model FLOPs (6 N + 12 L D T per trained token, a third of it per token read) over step time,
over the peak of the devices used: from their data sheet, or on a CPU the rate of a [2048, 768] x
[768, 3072] product measured in the same run.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import statistics
import sys
from typing import Any

from gpt2.architecture import ATTENTIONS, DTYPES, REMATS, SIZES
from gpt2.errors import UserError, exit_on_user_error, require_choice
from gpt2.utils.allocation import cpu_environment
from gpt2.utils.turns import Player

# What can be measured, and who else does it.
PEERS = {
    "train": ("torch", "torch_compile", "hf", "hf_compile"),
    "eval": ("torch", "torch_compile", "hf", "hf_compile"),
    "generate": ("hf",),
    "data": ("torch",),
}
OURS = "jax"

# What would change nothing: these three use one device, or none.
LAYOUT = ("backend", "data", "fsdp", "tensor")
IGNORED = {
    "train": (),
    "eval": (*LAYOUT, "remat"),
    "generate": (*LAYOUT, "remat", "attention"),
    "data": (*LAYOUT, "remat", "attention", "scan_layers", "compute"),
}

# Beside OpenAI's sizes: (num_layers, num_heads, embed_dim), context, batch, vocabulary.
SMALL = {
    "shakespeare-char-cpu": ((4, 4, 128), 64, 12, 65),
    "shakespeare-char": ((6, 6, 384), 256, 64, 65),
}


@exit_on_user_error
def main() -> None:
    options = parse(sys.argv[1:])
    case, peers = make_case(options), options.peers.split(",") if options.peers else []
    check_peers(peers, case)
    results = measure(case, peers, options.rounds, options.seconds)
    if options.json:
        print(json.dumps({"case": case, "results": results}, indent=2))
    else:
        print(table(case, results))


def parse(arguments: list[str]) -> argparse.Namespace:
    """Returns the options of the command line.

    Raises:
        UserError: they do not parse, or would be ignored.
    """
    parser = _Parser(
        prog="python -m gpt2.benchmark", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("subject", choices=tuple(PEERS), help="what to measure")
    parser.add_argument("--model", default="gpt2-124m", choices=(*SIZES, *SMALL))
    parser.add_argument("--batch_size", type=int, help="sequences per step, over all devices")
    parser.add_argument("--context_length", type=int, help="tokens")
    parser.add_argument("--compute", default="float32", choices=DTYPES)
    parser.add_argument("--attention", default="auto", choices=ATTENTIONS)
    parser.add_argument("--remat", default="none", choices=REMATS)
    parser.add_argument("--scan_layers", action="store_true")
    parser.add_argument("--backend", default="pjit", choices=("pjit", "pmap"))
    for axis, size in (("data", -1), ("fsdp", 1), ("tensor", 1)):
        parser.add_argument(f"--{axis}", type=int, default=size, help="devices; -1: the rest")
    parser.add_argument("--peers", default="", help=f"any of {','.join(PEERS['train'])}")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="least length of a turn after its first step"
    )
    parser.add_argument("--shares", action="store_true", help="time by part of the model")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    options = parser.parse_args(arguments)
    for name in IGNORED[options.subject]:
        if getattr(options, name) != parser.get_default(name):
            raise UserError(
                f"--{name} would be ignored by {options.subject}", f"Leave out --{name}"
            )
    prompt_and_text = 2 if options.subject == "generate" else 1
    least = dict(batch_size=1, context_length=prompt_and_text, rounds=1, seconds=0)
    for name, smallest in least.items():
        value = getattr(options, name)
        if value is not None and not smallest <= value < math.inf:
            raise UserError(f"--{name}={value} is out of range", f"Use {smallest} or more")
    return options


def make_case(options: argparse.Namespace) -> dict[str, Any]:
    """Returns all that decides what a step computes, by the names of the config's options."""
    sizes, *defaults = SMALL.get(options.model) or (SIZES[options.model], 1024, 2, 50257)
    context_length, batch_size, vocab_size = defaults
    case = {k: v for k, v in vars(options).items() if k not in ("peers", "rounds", "seconds")}
    case |= zip(("num_layers", "num_heads", "embed_dim"), sizes, strict=True)
    case["context_length"] = options.context_length or context_length
    case["batch_size"] = options.batch_size or batch_size
    case["vocab_size"] = vocab_size
    return case


def check_peers(peers: list[str], case: dict[str, Any]) -> None:
    """Raises a UserError unless the peers exist, are installed and can do what the case asks."""
    subject = case["subject"]
    for peer in peers:
        require_choice("--peers", peer, PEERS[subject], flag=False)
        package = "transformers" if peer.startswith("hf") else "torch"
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"--peers={peer} needs {package}", "Install it: pip install 'gpt2-jax[peers]'"
            )
    if case["shares"] and subject in ("generate", "data"):
        raise UserError(f"{subject} does not tell --shares", "Leave it out, or choose train")


def measure(
    case: dict[str, Any], peers: list[str], rounds: int, seconds: float
) -> dict[str, dict[str, Any]]:
    """Runs the case here and by the peers in turn, and returns what was found, by name.

    Args:
        case: from `make_case`.
        peers: of `PEERS[case["subject"]]`.
        rounds: how many turns each has after its warm-up.
        seconds: how long a turn lasts at least, beside its first step, which is not counted.
    """
    environment = os.environ | cpu_environment()  # the same memory settings for all
    argument = json.dumps(case)
    commands = {OURS: ["gpt2.benchmark_worker", argument]}
    commands |= {peer: ["gpt2.benchmark_peers", peer, argument] for peer in peers}
    players, steps = {}, {}
    with contextlib.ExitStack() as stack:
        for name, command in commands.items():
            command = [sys.executable, "-m", *command]
            players[name] = stack.enter_context(Player(name, command, environment))
            players[name].play(2)  # compiles, and fills caches
            steps[name] = max(1, math.ceil(seconds / players[name].play(1)[0]))
        medians = {name: [] for name in players}
        for _ in range(rounds):
            for name, player in players.items():
                # The first step after the others' turns fetches memory back that the machine took.
                _, *times = player.play(1 + steps[name])
                medians[name].append(statistics.median(times))
        infos = {name: player.info() for name, player in players.items()}
    ours = medians[OURS], infos[OURS]
    return {name: infos[name] | summarise(case, medians[name], *ours) for name in players}


def summarise(
    case: dict[str, Any], turns: list[float], our_turns: list[float], our_info: dict[str, Any]
) -> dict[str, Any]:
    """Returns a contestant's figures, from the median step of each turn in seconds.

    `speedup` is how many times faster ours was than it: median, least and most over the rounds.
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
    """Returns what a terminal shows."""
    ours = results[OURS]
    versions = dict(item for result in results.values() for item in result["versions"].items())
    versions = ", ".join(f"{name} {version}" for name, version in versions.items())
    peak = ours["peak_flops"]
    peak_text = f"{peak / 1e9:,.0f} GFLOP/s, {ours['peak_source']}" if peak else "-"
    lines = [
        f"{case['subject']} {case['model']}, {case['batch_size']} x {case['context_length']} "
        f"tokens, {case['compute']}, attention {ours['attention']}, remat {case['remat']}, "
        f"layers {'scanned' if case['scan_layers'] else 'unrolled'}",
        f"{ours['device']}, {os.cpu_count()} CPU cores, {versions}; peak: {peak_text}",
        f"compiled in {ours['compile_seconds']:.1f} s",
        "",
        f"{'':14s}{'step ms':>10s}{'(least':>9s}{'most)':>9s}{'tokens/s':>12s}{'MFU':>6s}"
        f"{'memory GB':>11s}" + ("  jax is faster by" if len(results) > 1 else ""),
    ]
    for name, result in results.items():
        mfu = f"{result['mfu']:.0%}" if result["mfu"] else "-"
        median, least, most = result["speedup"]
        speedup = "" if name == OURS else f"  {median:.2f} ({least:.2f} to {most:.2f})"
        lines.append(
            f"{name:14s}{1e3 * result['step_seconds']:10,.1f}{1e3 * min(result['turns']):9,.1f}"
            f"{1e3 * max(result['turns']):9,.1f}{result['tokens_per_second']:12,.0f}{mfu:>6s}"
            f"{result['peak_bytes'] / 1e9:11.2f}{speedup}"
        )
    if ours["shares"]:
        shares = ", ".join(f"{scope} {share:.0%}" for scope, share in ours["shares"].items())
        lines += ["", f"time by part: {shares}"]
    return "\n".join(lines)


class _Parser(argparse.ArgumentParser):
    """Reports mistakes as this project does."""

    def error(self, message: str) -> None:
        raise UserError(message, "See --help")


if __name__ == "__main__":
    main()
