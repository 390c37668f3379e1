r"""Measures how fast a step is, alone or beside PyTorch's.

    python -m gpt2.benchmark train --model=quickstart

times a training step of the small model, alone. For a first look, --rounds=1 is enough.

    python -m gpt2.benchmark train --model=gpt2-124m --batch_size=2 --compute=bfloat16 \
        --peers=torch,torch_compile

times a large one in turn with PyTorch's.

A step of `train` is a training step. A step of `eval` is the loss of a batch. A step of `generate`
continues a batch of prompts greedily: the prompts fill half of the context, and the continuations
the other half. A step of `data` reads a batch of text for training.

    python -m gpt2.benchmark train --model=quickstart --batch_size=4,8,16 \
        --compute=float32,bfloat16 --peers=torch,torch_compile --csv=FILE.csv --plot=FILE.png

measures each batch size in each type, one after the other.

    python -m gpt2.benchmark train --model=quickstart --vary=model.position=rope

times the same model with an option changed, in turn with the model as it is.

    python -m gpt2.benchmark verify --peers=torch,hf

compares loss, gradients and weights of first steps from the same weights. The same comes before
`train`, and the loss before `eval`: what differs is not timed.

Each contestant runs in a process of its own. They take turns, A B A B, so that a ratio compares
what ran seconds apart. Warm-up, the first step of a turn, compilation and, unless --with_data,
loading are outside the times. Clipping and the optimizer are inside. Dropout is 0.

`train` spreads over all devices. `eval` and `generate` run on one.

`suite` measures all of that on a GPU, and `wheels` gathers the packages that it needs there: see
gpt2/benchmark/suite/.

MFU is the model's FLOPs over the step's time, over the peak of the devices used. A trained token
takes 6 N + 12 L D T FLOPs, and a token that is only read takes a third of them. The peak comes from
the data sheet. On a CPU it is the rate of a [2048, 768] x [768, 3072] matrix product, measured in
the same run.
"""

from gpt2 import launch

if __name__ == "__main__":
    launch.prepare_process()

import json
import sys
from pathlib import Path
from typing import Any

from absl import flags

from gpt2 import cli
from gpt2.benchmark.case import (
    PEERS,
    check_peers,
    define_flags,
    make_cases,
    read_variations,
)
from gpt2.benchmark.first_step import first_difference
from gpt2.benchmark.measure import measure, refusal, verify
from gpt2.benchmark.suite import command as suite
from gpt2.benchmark.suite import wheels
from gpt2.benchmark.tables import agreement_table, rows, table, write_csv
from gpt2.errors import UserError

OTHERS = {"suite": suite, "wheels": wheels}


def main(subject: str) -> None:
    """Measures or verifies, and prints tables, or JSON."""
    options = flags.FLAGS
    wanted = make_cases(subject)
    for case in wanted:
        check_peers(options.peers, case)
    if subject == "verify":
        print_agreement(wanted, options.peers)
    else:
        print_speed(wanted)


def print_speed(wanted: list[dict[str, Any]]) -> None:
    """Measures each case and prints its table. Files hold what is measured so far."""
    options = flags.FLAGS
    variations = [read_variations(options.vary, case) for case in wanted]
    measured, lines = [], []
    for file in filter(None, (options.csv, options.plot)):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
    for case, varied in zip(wanted, variations, strict=True):
        results = measure(case, options.peers, options.rounds, options.seconds, varied)
        measured.append({"case": case, "results": results})
        lines += rows(case, results)
        if options.csv:
            write_csv(Path(options.csv), lines)
        if options.plot:
            from gpt2.benchmark.picture import plot  # brings matplotlib

            plot(Path(options.plot), lines)
        if not options.json:
            print(table(case, results), end="\n\n" if case is not wanted[-1] else "\n", flush=True)
    if options.json:
        print(json.dumps(measured if len(measured) > 1 else measured[0], indent=2))


def print_agreement(wanted: list[dict[str, Any]], peers: list[str]) -> None:
    """Compares first steps, and prints how far they lie apart.

    Raises:
        UserError: a peer computes something else.
    """
    if not peers:
        raise UserError("verify compares with peers, and there are none", "Add --peers=torch")
    refused = []
    for case in wanted:
        found = dict(verify(case, peers))
        end = "\n\n" if case is not wanted[-1] else "\n"
        print(agreement_table(case, found.items()), end=end, flush=True)
        refused += [
            refusal(name, difference)
            for name, agreements in found.items()
            if (difference := first_difference(agreements))
        ]
    if refused:
        raise refused[0]


if __name__ == "__main__":
    other = next((command for command in OTHERS if command in sys.argv[1:]), None)
    if other:  # with flags of its own
        cli.parse(OTHERS[other].define_flags, commands=(other,))
        cli.run(OTHERS[other].main)
    cli.parse(define_flags, commands=(*PEERS, *OTHERS))
    cli.run(main)
