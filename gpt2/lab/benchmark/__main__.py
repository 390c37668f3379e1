r"""Measures what a training step takes, alone or beside PyTorch's.

    python -m gpt2.lab.benchmark train --config=configs/gpt2_124m.py --config.data.batch_size=2 \
        --peers=torch,torch_compile --vary=model.position=rope

times the step of a config, in turn with PyTorch's and with an option changed. Warm-up, compilation
and data are outside the times; clipping and the optimizer are inside. Beside peers, dropout is 0,
the rate constant and the vocabulary a multiple of 64. First steps from the same weights are
compared, and what differs is not timed. For a first look, --rounds=1 does.

`suite` runs it on a GPU, and train.py itself, each part with a time limit; --config.a.b=v changes
all.

MFU is the model's FLOPs, 6 N + 12 L D T a token, over time and the data sheet's peak. Memory is the
peak of a GPU's allocator; on a CPU, of the process.
"""

from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

import importlib.util
import json
import math
import sys
from pathlib import Path

from absl import flags

from gpt2 import cli
from gpt2.config import DEFAULTS, Config, with_options
from gpt2.data.tokenizer import tokens_by_name
from gpt2.errors import UserError, require_choice
from gpt2.lab.benchmark import measure, suite
from gpt2.lab.benchmark.tables import Row, table

COMMANDS = ("train", "suite")


def define_flags() -> None:
    """Defines the flags of all commands."""
    cli.define_config()
    flags.DEFINE_list("peers", [], "train: torch, torch_compile or both.")
    about = "train: the Python that runs peers, where this one has no PyTorch."
    flags.DEFINE_string("peer_python", sys.executable, about)
    about = "train: one more side, with OPTION=VALUE,OPTION=VALUE or XLA_FLAGS=...; a flag a side."
    flags.DEFINE_multi_string("vary", [], about)
    flags.DEFINE_integer("rounds", 5, "Turns of each side.", lower_bound=1)
    about = "Least length of a turn after its first step."
    flags.DEFINE_float("seconds", 2.0, about, lower_bound=0.0)
    flags.DEFINE_bool(
        "json", False, "Print rows as JSON, a line each, in place of a table."
    )
    flags.DEFINE_string("output", "", "suite: the folder of its results.")


def main(command: str) -> int:
    """Runs a command, and returns the exit code: 1 if a part of the suite failed."""
    args = flags.FLAGS
    if command == "suite":
        if not args.output:
            raise UserError("there is no --output", "Name the folder of the results")
        output = Path(args.output).expanduser()
        return int(not suite.run_suite(output, cli.overrides()))
    rows = measure_cases()
    if args.json:
        for row in rows:
            print(json.dumps(row))
    else:
        print(table(rows))
    return 0


def measure_cases() -> list[Row]:
    """Returns a row for the config, for each peer and for each variation."""
    args = flags.FLAGS
    has_torch = importlib.util.find_spec("torch") is not None
    if args.peers and args.peer_python == sys.executable and not has_torch:
        raise UserError("--peers needs PyTorch", "Install it, or give --peer_python")
    case = measure.Case(make_config(args.peers))
    cases = {measure.OURS: case}
    for peer in args.peers:
        cases[peer] = case._replace(python=args.peer_python)
    for text in args.vary:
        cases[text] = case.varied(text)
    return measure.measure(cases, rounds=args.rounds, seconds=args.seconds)


def make_config(peers: list[str]) -> Config:
    """Returns the config of the command line; beside peers, as they can have it too."""
    config = cli.parse_config()
    config = config.with_vocabulary(tokens_by_name(config.data.tokenizer))
    if not peers:
        return config
    for peer in peers:
        require_choice("--peers", peer, measure.PEERS)
    options = {
        "optim.schedule": "constant",
        "optim.decay_fraction": DEFAULTS.optim.decay_fraction,
        "optim.warmup_steps": 0,
        "model.dropout": 0.0,
        # A multiple of 64, as nanoGPT trains.
        "model.vocab_size": 64 * math.ceil(config.model.vocab_size / 64),
    }
    return with_options(config, options)


if __name__ == "__main__":
    cli.run(main, define_flags, commands=COMMANDS)
