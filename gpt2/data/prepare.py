"""Prepares a corpus ahead of time. train.py does the same when its corpus is not prepared yet.

python -m gpt2.data.prepare --config=configs/gpt2_124m.py [--config.data.corpus=pystdlib]
"""

from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

from gpt2 import cli
from gpt2.data.dataset import prepare
from gpt2.utils.text import counted


def main() -> None:
    """Prepares the corpus of `--config` and prints what it holds."""
    dataset = prepare(cli.parse_config().data)
    for name, split in dataset.splits.items():
        print(
            f"{name}: {counted(split.num_tokens, 'token')}, {counted(split.num_bytes, 'byte')}, "
            f"{counted(split.num_documents, 'document')}"
        )
    print(f"vocabulary: {dataset.tokenizer.vocab_size:,} tokens")
    print(f"zlib -9: {dataset.zlib_bits_per_byte:.3f} bits per byte of validation text")
    print(dataset.directory)


if __name__ == "__main__":
    cli.run(main, cli.define_config, default_config="quickstart")
