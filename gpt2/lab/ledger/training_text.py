"""The text of a ledger: runs read the training split, and the ledger reads the validation split.

When a ledger starts, the training split is copied to the ledger's folder, and runs read this copy.
Neither their options nor their environment name the corpus or the folder of prepared corpora, which
also contain the validation split. A run validates on the first tokens of its training split. The
resulting loss has no effect on the answer to an idea.
"""

import glob
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from gpt2.config import DataConfig
from gpt2.data import Dataset, prepare_dataset
from gpt2.data.datasets import read_mixture
from gpt2.data.tokens import map_shard
from gpt2.errors import UserError, log
from gpt2.lab.experiments.arms import Arm
from gpt2.utils import files

_FOLDER = "data"
_FACTS = "data.json"
_TOKENIZER = "tokenizer.json"
# A run validates on this number of tokens, from the start of each corpus's training split.
_NUM_VALIDATED = 1024


def open_text(root: Path, data: DataConfig) -> Dataset:
    """Return the dataset of a ledger. For a new ledger, copy the training split to its folder.

    `root` is the folder of the ledger, and `data` are the options of its corpus. Raise a UserError
    if the text or the tokenizer has changed since the ledger started.
    """
    folder = root.absolute() / _FOLDER
    facts = folder / _FACTS
    dataset = prepare_dataset(data, files.read_sealed(facts))
    with files.locked(root / ".data.lock"):
        if not folder.exists():
            with files.new_directory(folder) as partial:
                log(f"copying the training split to {folder}, where runs read it")
                _copy_training_split(dataset, partial)
                files.write_json(partial / _FACTS, files.seal(dataset.describe()))
    if files.read_sealed(facts) != dataset.describe():
        raise UserError(
            f"The text or tokenizer of data.corpus={data.corpus} has changed since {root} started",
            "Restore the text and tokenizer, or start another --ledger",
        )
    # The runs that this process starts look for prepared corpora in this folder. The training split
    # is prepared here, because a sandbox may prevent the runs from writing to the folder.
    os.environ["GPT2_DATA_DIR"] = str(folder / "prepared")
    prepare_dataset(_training_options(root, data))
    return dataset


def _copy_training_split(dataset: Dataset, folder: Path) -> None:
    """Write to `folder` all that runs read: the tokenizer and, for each corpus, its tokens.

    The tokens are the training split, and the first tokens of this split, with which runs validate.
    """
    dataset.tokenizer.save(folder / _TOKENIZER)
    for number, (_, part) in enumerate(dataset.parts.values()):
        copy = folder / str(number)
        copy.mkdir()
        for index, shard in enumerate(part.splits["train"].shards):
            file, skip, num_tokens = shard
            path = str(part.directory / file)
            tokens = map_shard(path, skip, num_tokens, part.dtype)
            np.save(copy / f"train-{index:05}.npy", tokens)
        first = part.stream("train").read(0, _NUM_VALIDATED)
        np.save(copy / "validation.npy", first.astype(part.dtype))


def with_training_text(root: Path, arm: Arm) -> Arm:
    """Return an arm whose runs read only the copy of the training split in the folder `root`."""
    data = _training_options(root, arm.config.data)
    return replace(arm, config=replace(arm.config, data=data))


def _training_options(root: Path, data: DataConfig) -> DataConfig:
    """Return `data`, changed so that a run reads only the ledger's copy of the training split."""
    folder = root.absolute() / _FOLDER
    numbers = [1]
    weights = read_mixture(data.corpus)
    if weights:
        # A mixture names whole numbers, because 1/3, for example, has no exact decimal fraction.
        common = math.lcm(*(weight.denominator for weight in weights.values()))
        numbers = [int(common * weight) for weight in weights.values()]
    parts = []
    for index, number in enumerate(numbers):
        tokens = f"tokens:{glob.escape(str(folder))}/{index}/*.npy"
        parts.append(f"{number}*{tokens}" if weights else tokens)
    return replace(
        data,
        corpus="+".join(parts),
        tokenizer=str(folder / _TOKENIZER),
        end_of_text="",
        unique=False,
        data_dir="",
    )
