"""Prepares a corpus ahead of time. train.py does the same when its corpus is not prepared yet.

python -m gpt2.data.prepare --config=configs/gpt2_124m.py [--config.data.corpus=pystdlib]
"""

from gpt2.errors import UserError
from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

import numpy as np
from absl import flags

from gpt2 import cli
from gpt2.data.dataset import prepare
from gpt2.data.loader import TrainLoader
from gpt2.utils.cluster import connect


def main() -> None:
    """Prepares the corpus of `--config` and prints what it holds."""
    config = cli.parse_config()
    data = config.data
    dataset = prepare(config.data, connect(flags.FLAGS.cluster))
    if dataset.own:
        raise UserError(f"{data.corpus} gives batches, of which none are stored")
    for name, (_, part) in dataset.parts.items():
        print(
            (part.directory / "README.md").read_text("utf-8"), part.directory, sep="\n"
        )
        if flags.FLAGS.inspect:
            loader = TrainLoader(
                dataset,
                batch_size=data.batch_size,
                context_length=config.model.context_length,
                seed=config.seed,
                packing=data.packing,
            )
            rows = loader.sources[name]
            for number in range(min(3, rows.num_rows)):
                row = rows.read(number)
                first, *others = np.split(
                    row, np.flatnonzero(row == part.tokenizer.eot)
                )
                pieces = [first, *(piece[1:] for piece in others)]
                print(f"\n===== row {number}; a line opens each document")
                print("\n-----\n".join(map(part.tokenizer.decode, pieces)))


def define_flags() -> None:
    """Defines the flags of a config, `--inspect` and `--cluster`."""
    cli.define_config()
    flags.DEFINE_string(
        "cluster", "", "ray[:ADDRESS]: a Ray cluster's nodes encode the text."
    )
    flags.DEFINE_bool(
        "inspect", False, "Show three rows as training would see them, too."
    )


if __name__ == "__main__":
    cli.run(main, define_flags)
