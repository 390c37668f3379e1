"""Prepare a corpus ahead of time. train.py does the same when its corpus is not prepared yet.

python -m gpt2.data.prepare --config=configs/gpt2_124m.py [--config.data.corpus=pystdlib]
"""

from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

import numpy as np
from absl import flags

from gpt2 import cli
from gpt2.data.datasets import prepare_dataset
from gpt2.signals import exit_at_interrupt
from gpt2.utils.ray_cluster import connect


def main() -> None:
    """Prepare the corpus of `--config`, and print its numbers of tokens, bytes and documents."""
    config = cli.parse_config()
    exit_at_interrupt("the same command continues")
    connect(flags.FLAGS.cluster)
    data = config.data
    dataset = prepare_dataset(data)
    for _, part in dataset.parts.values():
        print(f"{part.directory}, {part.dtype}:")
        for name, split in part.splits.items():
            print(
                f"{name}: {split.num_tokens:,} tokens of {split.num_bytes:,} bytes in "
                f"{split.num_documents:,} documents"
            )
    if flags.FLAGS.inspect:
        config = config.with_vocabulary(dataset.tokenizer.vocab_size)
        batch = dataset.open(config).batch(1, slice(0, config.data.batch_size))
        rows = zip(batch["tokens"][:3], batch["targets"], strict=False)
        for number, (tokens, targets) in enumerate(rows, 1):
            print(f"\n===== row {number} of the first training step")
            # After the last target, there is only padding.
            end = np.flatnonzero(targets >= 0).max(initial=-1) + 1
            print(dataset.tokenizer.decode(tokens[:end]))


def define_flags() -> None:
    """Define `--config` and its overrides, `--cluster`, and `--inspect`."""
    cli.define_config()
    cli.define_cluster()
    flags.DEFINE_bool(
        "inspect", False, "Also print the first three rows of the first training step."
    )


if __name__ == "__main__":
    cli.run(main, define_flags)
