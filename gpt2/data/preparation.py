"""A corpus on disk: what is wanted, whether it is there, and else how it gets there.

A prepared corpus is a folder under `data.data_dir`. A hash of all that the corpus depends on is
part of its name. One process at a time writes it, under another name, and renames it when it is
complete.
"""

import dataclasses
import os
import re
import shutil
import sys
from fractions import Fraction
from pathlib import Path

from gpt2.config import DataConfig
from gpt2.data import tokenizer as tokenizers
from gpt2.data.corpus import open_corpus
from gpt2.data.dataset import Dataset
from gpt2.data.foreign import hash_of
from gpt2.data.own import find_batches
from gpt2.data.ready import index, open_ready_tokens
from gpt2.data.splits import PROGRESS, write_splits
from gpt2.data.tokens import Split
from gpt2.errors import UserError, log, warn
from gpt2.utils import files, stores

FORMAT = 8  # of a prepared folder; another number prepares everything anew
FACTS = "prepared.json"  # which comes last, and tells that the rest is there
PLUS = re.compile(r"\+(?=\d*\.?\d+\*)")  # before each part of a mixture

# Files of up to this size in all are read at every start, to notice damage; of more, sizes count.
_READ_BYTES = 1 << 28


def prepare(data: DataConfig) -> Dataset:
    """Returns what `data.corpus` names, prepared; what is not yet, it prepares."""
    own = find_batches(data.corpus)
    shares = read_mixture(data.corpus)
    if not own and not shares:
        return _prepare_corpus(data)
    if data.tokenizer == "char" or data.tokenizer.startswith("bpe:"):
        raise UserError(
            f"data.tokenizer={data.tokenizer} is made from one corpus of text, and "
            f"data.corpus={data.corpus} is none",
            "Let gpt2.data.prepare make it of one, and name the tokenizer.json in its folder",
        )
    if own:
        tokenizer = tokenizers.build(data.tokenizer, end_of_text=data.end_of_text)
        return Dataset(Path(), tokenizer, {}, "", own=own)
    mixed = dict[str, tuple[Fraction, Dataset]]()
    for name, share in shares.items():
        part = prepare(dataclasses.replace(data, corpus=name))
        if part.own:
            raise UserError(f"{name} gives batches", "Mix in your function")
        mixed[name] = share, part
    return Dataset(Path(), part.tokenizer, {}, "", mixed)


def read_mixture(spec: str) -> dict[str, Fraction]:
    """Returns the parts of `0.7*ONE+0.3*OTHER` with their shares, which add to 1; else nothing."""
    if not PLUS.match(f"+{spec}"):
        return {}
    weights = dict[str, Fraction]()
    for part in PLUS.split(spec):
        weight, name = part.split("*", 1)
        if name in weights or not Fraction(weight):
            raise UserError(
                f"data.corpus={spec!r} has a part of no weight, or one twice"
            )
        weights[name] = Fraction(weight)
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def _prepare_corpus(data: DataConfig) -> Dataset:
    place = resolve(data)
    directory = stores.copy_of(place).absolute()
    dataset = find(directory)
    if dataset is None:
        try:
            with files.locked(directory.with_name(f".{directory.name}.lock")):
                # Another process may have prepared it meanwhile, or another machine.
                stores.fetch(place)
                dataset = find(directory) or write(data, place, directory)
        except OSError as error:
            raise UserError(
                f"the prepared corpus cannot be written in {directory.parent} ({error})",
                "Make room, and repeat the command: it goes on. --config.data.data_dir=DIR and "
                "$GPT2_DATA_DIR name another place",
            ) from error
    stores.push(place, directory)
    if lost := sum(split.num_lost for split in dataset.splits.values()):
        num_bytes = sum(split.num_bytes for split in dataset.splits.values())
        warn(
            f"{lost / num_bytes:.2%} of the bytes of {data.corpus} ({lost:,}) are unknown to its "
            "tokenizer, or altered by it: no bits per byte are given"
        )
    return dataset


# What is wanted


def resolve(data: DataConfig) -> str:
    """Returns the folder or URL that holds what the options name, once it is prepared."""
    if data.corpus.startswith("tokens:"):
        source = open_ready_tokens(data).fingerprint
    else:
        source = open_corpus(data.corpus).fingerprint
    spec = tokenizers.check_spec(data.tokenizer, data.end_of_text)
    label = f"{data.corpus}-{Path(data.tokenizer).name}"
    label = re.sub(r"[^\w.-]+", "-", label)
    label = label[-60:].strip("-")
    key = hash_of([FORMAT, source, spec, data.val_fraction, data.unique])
    return f"{data_place(data.data_dir)}/{label}-{key[:16]}"


def data_place(data_dir: str) -> str:
    """Returns where prepared corpora lie: `data_dir`, $GPT2_DATA_DIR or ~/.cache/gpt2-jax."""
    return data_dir or os.environ.get("GPT2_DATA_DIR") or "~/.cache/gpt2-jax"


# Whether it is there


def find(directory: Path) -> Dataset | None:
    """Returns a corpus that is prepared on this machine, and whole."""
    facts = files.read_sealed(directory / FACTS)
    if facts is None:
        return None
    total = sum(size for size, _ in facts["files"].values())
    is_read = total <= _READ_BYTES
    if files.find_damage(directory, facts["files"], read=is_read):
        return None
    tokenizer = tokenizers.load(directory / "tokenizer.json")
    splits = {name: Split(**split) for name, split in facts["splits"].items()}
    return Dataset(directory, tokenizer, splits, facts["dtype"])


# How it gets there


def write(data: DataConfig, place: str, directory: Path) -> Dataset:
    """Prepares into a folder of its own, going on where it was cut, and renames that."""
    if (directory / FACTS).exists():
        warn(f"{directory} is damaged, and is prepared anew")
    log(f"preparing {data.corpus} for {data.tokenizer}, once", sys.stdout)
    partial = directory.with_name(f".{directory.name}.partial")
    partial.mkdir(exist_ok=True)
    try:
        if data.corpus.startswith("tokens:"):
            dataset = index(open_ready_tokens(data), data, partial)
        else:
            dataset = write_splits(open_corpus(data.corpus), data, partial)
        for name, split in dataset.splits.items():
            # A model that is only scored may be given all of the text.
            is_read = name == "validation" or data.val_fraction < 1
            if is_read and split.num_tokens < 2:
                raise UserError(
                    f"data.val_fraction={data.val_fraction} leaves no token to predict in the "
                    f"{name} split of data.corpus={data.corpus}",
                    "Choose another fraction, or a longer text",
                )
        if resolve(data) != place:
            (partial / PROGRESS).unlink(missing_ok=True)
            raise UserError(
                f"the text that data.corpus={data.corpus} names has changed while it was read",
                "Repeat the command",
            )
        names = ["tokenizer.json"]
        for path in sorted(partial.glob("*.bin")):
            names.append(path.name)
        facts = {
            "dtype": dataset.dtype,
            "splits": {name: vars(split) for name, split in dataset.splits.items()},
            "files": files.digest_files(partial, names),
        }
        files.write_json(partial / FACTS, files.seal(facts))
        files.sync_tree(partial)
        shutil.rmtree(directory, ignore_errors=True)  # which was damaged
        partial.rename(directory)
    finally:
        if not (partial / PROGRESS).exists():
            shutil.rmtree(partial, ignore_errors=True)
    (directory / PROGRESS).unlink(missing_ok=True)
    return dataclasses.replace(dataset, directory=directory)
