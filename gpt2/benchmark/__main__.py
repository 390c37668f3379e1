r"""Measures how fast a step is, alone or beside PyTorch's.

    python -m gpt2.benchmark train --model=gpt2-124m --batch_size=2 --compute=bfloat16 \
        --peers=torch,torch_compile

A step of `train` is a training step. A step of `eval` is the loss of a batch. A step of `generate`
continues a batch of prompts greedily: the prompts fill half of the context, and the continuations
the other half. A step of `data` reads a batch of text for training.

    python -m gpt2.benchmark train --model=quickstart --vary=model.position=rope

times the same model with an option changed, in turn with the model as it is.

Each contestant runs in a process of its own. They take turns, A B A B, so that a ratio compares
what ran seconds apart. Warm-up, the first step of a turn, compilation and data loading are outside
the times. Clipping and AdamW are inside. All use the device's default precision for the compute
type, and dropout is 0.

`train` spreads over all devices. `eval` and `generate` run on one.

`suite` measures all of that on a GPU, and `wheels` gathers the packages that it needs there: see
gpt2/benchmark/suite.py and wheels.py.

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

from absl import flags

from gpt2 import cli
from gpt2.benchmark import case, suite, wheels
from gpt2.benchmark.case import (
    PEERS,
    check_peers,
    define_flags,
    make_case,
    read_variations,
)
from gpt2.benchmark.measure import measure, table

OTHERS = {"suite": suite, "wheels": wheels}


def main(subject: str) -> None:
    """Measures `subject` and prints a table, or JSON."""
    options = flags.FLAGS
    measured = make_case(subject)
    check_peers(options.peers, measured)
    variations = read_variations(options.vary, measured)
    results = measure(measured, options.peers, options.rounds, options.seconds, variations)
    if options.json:
        print(json.dumps({"case": measured, "results": results}, indent=2))
    else:
        print(table(measured, results))


if __name__ == "__main__":
    other = next((command for command in OTHERS if command in sys.argv[1:]), None)
    if other:  # with flags of its own
        OTHERS[other].define_flags()
        flags.adopt_module_key_flags(OTHERS[other])  # for --help
        cli.run(OTHERS[other].main, commands=(other,))
    define_flags()
    flags.adopt_module_key_flags(case)  # for --help
    cli.run(main, commands=(*PEERS, *OTHERS))
