r"""Measure the time of a training step, alone or together with PyTorch's.

    python -m gpt2.lab.benchmark train --config=configs/gpt2_124m.py \
        --config.data.batch_size=2 --peers=torch,torch_compile \
        --vary=model.position=rope

This command measures in turn: a step of the config, a step of each peer (the same model in PyTorch)
and, for each --vary, a step of the config with these options changed. The time includes clipping
and the optimizer, but not warm-up, compilation or data. With --peers, the command turns dropout
and stochastic depth off, makes the learning rate constant, and rounds the size of the vocabulary up
to a multiple of 64. It then compares the losses of the first steps before it measures, and stops
with an error if they differ. For a quick first measurement, add --rounds=1.

    python -m gpt2.lab.benchmark suite --output=DIR

This command runs a fixed list of benchmarks on a GPU: the command `train`, runs of train.py and a
profile, each with a time limit. --config.GROUP.OPTION=VALUE changes an option of all these runs.

MFU is the model's FLOPs, divided by the time and by the peak rate on the data sheet. A token needs
6 N + 12 L D T FLOPs, for N parameters, L layers of width D and a context of T tokens. Memory is the
peak of a GPU's allocator or, on a CPU, of the process.
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
from gpt2.config.options import OPTIONS
from gpt2.data.tokenizer import tokens_by_name
from gpt2.errors import UserError, require_choice
from gpt2.lab.benchmark import measure, suite
from gpt2.lab.benchmark.tables import Row, table

COMMANDS = ("train", "suite")


def define_flags() -> None:
    """Define the flags of the commands `train` and `suite`."""
    cli.define_config()
    flags.DEFINE_list(
        "peers", [], "train: also time PyTorch: torch, torch_compile or both."
    )
    about = "train: path of the Python that runs the peers, if this one has no PyTorch."
    flags.DEFINE_string("peer_python", sys.executable, about)
    about = (
        "train: also time the config with OPTION=VALUE,... or XLA_FLAGS=... set; may be"
        " repeated."
    )
    flags.DEFINE_multi_string("vary", [], about)
    flags.DEFINE_integer(
        "rounds",
        5,
        "train: how often the config, each peer and each variation are timed.",
        lower_bound=1,
    )
    about = (
        "train: shortest duration of each timing, in seconds, without its first step."
    )
    flags.DEFINE_float("seconds", 2.0, about, lower_bound=0.0)
    about = "train: print each row of the table as a line of JSON."
    flags.DEFINE_bool("json", False, about)
    flags.DEFINE_string("output", "", "suite: folder for the results.")


def main(command: str) -> int:
    """Run the command `train` or `suite`. Return the exit code.

    The exit code is 1 if a part of the suite failed, and otherwise 0.
    """
    args = flags.FLAGS
    if command == "suite":
        if not args.output:
            raise UserError(
                "The suite of benchmarks needs a folder for its results",
                "Add --output=FOLDER",
            )
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
    """Time a training step of the config, of each peer (in PyTorch) and of each variation.

    Return a row of results for each.
    """
    args = flags.FLAGS
    has_torch = importlib.util.find_spec("torch") is not None
    if args.peers and args.peer_python == sys.executable and not has_torch:
        raise UserError(
            "--peers needs PyTorch, which this Python does not have",
            "Install PyTorch, or set --peer_python to a Python that has PyTorch",
        )
    case = measure.Case(make_config(args.peers))
    cases = {measure.OURS: case}
    for peer in args.peers:
        cases[peer] = case._replace(python=args.peer_python)
    for text in args.vary:
        cases[text] = case.varied(text)
    return measure.measure(cases, rounds=args.rounds, seconds=args.seconds)


def make_config(peers: list[str]) -> Config:
    """Return the config of the command line, adapted to what PyTorch's implementations support.

    `peers` are the names of the PyTorch implementations to compare with. These implementations have
    a constant learning rate, a vocabulary of a multiple of 64 tokens, and no random options, such
    as dropout. If `peers` is not empty, the config gets the same properties.
    """
    config = cli.parse_config()
    config = config.with_vocabulary(tokens_by_name(config.data.tokenizer))
    if not peers:
        return config
    for peer in peers:
        require_choice("--peers", peer, measure.PEERS)
    random = [name for name, option in OPTIONS.items() if option.is_random]
    options = {
        **dict.fromkeys(random, 0.0),
        "optim.schedule": "constant",
        "optim.decay_fraction": DEFAULTS.optim.decay_fraction,
        "optim.warmup_steps": 0,
        # The vocabulary is a multiple of 64, as in nanoGPT.
        "model.vocab_size": 64 * math.ceil(config.model.vocab_size / 64),
    }
    return with_options(config, options)


if __name__ == "__main__":
    cli.run(main, define_flags, commands=COMMANDS)
