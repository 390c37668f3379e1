"""What a run's data.json tells of its text, to know another text of the same name."""

import dataclasses
from pathlib import Path

from gpt2.data.dataset import Dataset
from gpt2.data.tokenizer import fingerprint
from gpt2.utils.digests import read_sealed


def describe_data(dataset: Dataset) -> dict:
    """Describes a corpus by what it holds, not by where it lies, so that its files can move."""
    return {
        "splits": {name: dataclasses.asdict(split) for name, split in dataset.splits.items()},
        "zlib_bits_per_byte": dataset.zlib_bits_per_byte,
        "token_crc32": dataset.token_crc32,
        "tokenizer": dataset.tokenizer.name,
        "tokenizer_sha256": fingerprint(dataset.tokenizer),
    }


def read_data(path: Path) -> dict | None:
    """Returns what a run's data.json tells of its text, or None if it is missing or damaged.

    A file of before it had a sum of its own is believed.
    """
    saved = read_sealed(path, unsealed=True)
    return saved if saved is not None and "splits" in saved else None


def differing_data(saved: dict, found: dict) -> set[str]:
    """Returns in what two texts differ, as far as both descriptions tell."""
    return {name for name in saved if saved[name] != found.get(name, saved[name])}
