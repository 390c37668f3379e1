"""A prepared corpus, and its preparation: documents -> tokens -> shards, once.

A prepared corpus is a directory under `data.data_dir`. A hash of all that the corpus depends on is
part of its name. One process at a time writes it, under another name, and renames it when it is
complete.
"""

import dataclasses
import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

from gpt2.config import DataConfig
from gpt2.data import tokenizer as tokenizers
from gpt2.data.corpus import Corpus, open_corpus
from gpt2.data.growth import GrowingStream, Growth
from gpt2.data.own import find_batches
from gpt2.data.splits import PROGRESS, SPLITS, write_splits
from gpt2.data.tokens import ReadyTokens, Shard, TokenStream, index, open_ready_tokens
from gpt2.errors import UserError, tell, warn
from gpt2.utils import files, stores

FORMAT = 7  # of a prepared directory; another number prepares everything anew
README = """# {corpus}, as tokens of {tokenizer}: {dtype} without a header

Token {eot} begins each of several documents; {num_dropped} that had come before were dropped. This
makes the folder, again if it is deleted, and with `--inspect` shows rows as training sees them:

    python -m gpt2.data.prepare {command}

| | train | validation |
|---|---|---|
{table}
"""
PLUS = re.compile(r"\+(?=\d*\.?\d+\*)")  # before each part of a mixture

# Files of up to this size in all are read at every start, to notice damage; of more, sizes count.
_READ_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True)
class Split:
    """What a split holds."""

    num_tokens: int  # length of the token stream, end-of-text tokens included
    num_bytes: int  # UTF-8 bytes of the documents' text; end-of-text tokens count none
    num_documents: int  # the two halves of a single text count as one each
    num_lost: int = 0  # bytes that the tokens do not give back

    @property
    def targets_per_byte(self) -> float | None:
        """Tokens to predict, all but the first, for each byte of text; None if bytes are lost."""
        return None if self.num_lost else (self.num_tokens - 1) / self.num_bytes


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A prepared corpus."""

    directory: Path
    tokenizer: tokenizers.Tokenizer
    splits: dict[str, Split]  # `train` and `validation`
    token_crc32: dict[str, Any]  # of each split's tokens; of a mixture, of each part's
    shards: dict[str, list[Shard]]  # of each split, in `directory` or elsewhere
    dtype: str  # of stored tokens
    mixed: dict[str, tuple[Fraction, "Dataset"]] = dataclasses.field(
        default_factory=dict
    )
    own: Callable | None = (
        None  # the user's function that gives batches, where there is no text
    )
    block: int = 0  # tokens that are shuffled among themselves; 0: all
    growth: Growth | None = None  # where this is a first part of a corpus

    @property
    def parts(self) -> dict[str, tuple[Fraction, "Dataset"]]:
        """The corpora of a mixture with their shares, or this one without a name."""
        return self.mixed or {"": (Fraction(1), self)}

    @property
    def targets_per_byte(self) -> float | None:
        """Tokens to predict for each byte of held-out text, where parts have their shares."""
        each = [
            (share, part.splits["validation"].targets_per_byte)
            for share, part in self.whole().parts.values()
        ]
        if any(ratio is None for _, ratio in each):
            return None
        return float(1 / sum(share / Fraction(ratio) for share, ratio in each if ratio))

    def open(self, split: str) -> TokenStream:
        """Returns the token stream of `train` or `validation`."""
        if self.growth:
            return GrowingStream(self.growth, split)
        return TokenStream(self.shards[split], self.dtype, self.directory)

    def whole(self) -> "Dataset":
        """Returns the corpus, all of which is prepared then."""
        if self.mixed:
            return _mix(
                {
                    name: (share, part.whole())
                    for name, (share, part) in self.mixed.items()
                }
            )
        return self.growth.whole.result() if self.growth else self

    def describe(self) -> dict:
        """Returns what the corpus holds, not where it lies, for a run's data.json."""
        tokenizer = self.tokenizer
        parts = [part for _, part in self.parts.values()]
        facts: dict[str, Any] = dict(tokenizer=tokenizer.name)
        facts["tokenizer_sha256"] = tokenizers.fingerprint(tokenizer)
        facts["first_crc32"] = [
            p.open("train").crc32(p.block) for p in parts if p.block
        ]
        if any(part.growth for part in parts):
            return facts
        splits = {
            name: dataclasses.asdict(split) for name, split in self.splits.items()
        }
        return facts | {"splits": splits, "token_crc32": self.token_crc32}


def refuse_other(path: Path, dataset: Dataset) -> bool:
    """Refuses a corpus that is not the one of a run's data.json; returns if that tells anything."""
    saved = files.read_sealed(path) or {}
    found = dataset.describe() if saved else {}
    if differing := {
        name for name in found if saved.get(name, found[name]) != found[name]
    }:
        other = differing & {"tokenizer", "tokenizer_sha256"}
        name = (
            "the tokenizer that data.tokenizer"
            if other
            else "the text that data.corpus"
        )
        what = f"{name} names is no longer what {path.parent} was trained on"
        raise UserError(what, "Restore it, or give another --workdir")
    return bool(saved)


def data_place(data_dir: str) -> str:
    """Returns where prepared corpora lie: `data_dir`, $GPT2_DATA_DIR or ~/.cache/gpt2-jax."""
    return data_dir or os.environ.get("GPT2_DATA_DIR") or "~/.cache/gpt2-jax"


def data_root(data_dir: str) -> Path:
    """Returns where that is on this machine."""
    return stores.copy_of(data_place(data_dir)).absolute()


def prepare(data: DataConfig, ray: Any = None, *, ahead: bool = False) -> Dataset:
    """Returns the prepared corpus of a config, and prepares it first, maybe by Ray, if need be.

    `ahead` may return it once a first `data.shuffle_block` is prepared, and a thread goes on.
    """
    needs_text = data.tokenizer == "char" or data.tokenizer.startswith("bpe:")
    if own := find_batches(data.corpus):
        if needs_text:
            raise UserError(
                f"{data.corpus} has no text for data.tokenizer={data.tokenizer}"
            )
        tokenizer = tokenizers.build(data.tokenizer, end_of_text=data.end_of_text)
        return Dataset(Path(), tokenizer, {}, {}, {}, "", own=own)
    if shares := read_mixture(data.corpus):
        what = f"data.tokenizer={data.tokenizer} is made from one corpus, and this is a mixture"
        how = "Let gpt2.data.prepare make it of a part, and name the tokenizer.json in its folder"
        if needs_text:
            raise UserError(what, how)
        one = functools.partial(dataclasses.replace, data)
        each = {name: prepare(one(corpus=name), ray, ahead=ahead) for name in shares}
        return _mix({name: (shares[name], each[name]) for name in shares})
    corpus = _open_source(data)
    spec = tokenizers.check_spec(data.tokenizer, data.end_of_text)
    parts = [FORMAT, corpus.fingerprint, spec, data.val_fraction, data.unique]
    label = re.sub(r"[^\w.-]+", "-", f"{data.corpus}-{Path(data.tokenizer).name}")[
        -60:
    ].strip("-")
    place = f"{data_place(data.data_dir)}/{label}-{_hash(parts)}"
    directory = stores.copy_of(place).absolute()
    if ahead and data.shuffle_block and _find_damage(directory) is not None:
        find = functools.partial(_begun, directory, data, time.time_ns())
        return Growth(functools.partial(prepare, data, ray), find).wait(
            "train", data.shuffle_block
        )
    if _find_damage(directory) is not None:
        try:
            with files.locked(directory.with_name(f".{directory.name}.lock")):
                # Another process may have prepared it meanwhile, or another machine.
                if _find_damage(directory) is not None:
                    stores.fetch(place)
                if (damage := _find_damage(directory)) is not None:
                    if damage:
                        warn(f"{directory} is damaged ({damage}), and is prepared anew")
                    tell(
                        f"preparing {data.corpus} for {data.tokenizer}, once",
                        sys.stdout,
                    )
                    _write(directory, corpus, data, ray)
        except OSError as error:
            raise UserError(
                f"the prepared corpus cannot be written in {directory.parent} ({error})",
                "Make room, and repeat the command: it goes on. --config.data.data_dir=DIR and "
                "$GPT2_DATA_DIR name another place",
            ) from error
    stores.push(place, directory)
    tree = json.loads((directory / "prepared.json").read_text(encoding="utf-8"))
    dataset = _load(directory, tree, data)
    if lost := sum(split.num_lost for split in dataset.splits.values()):
        share = lost / sum(split.num_bytes for split in dataset.splits.values())
        what = f"{share:.2%} of the bytes of {data.corpus} ({lost:,})"
        warn(
            f"{what} are unknown to its tokenizer, or altered by it: no bits per byte are given"
        )
    return dataset


def _hash(parts: list) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def read_mixture(spec: str) -> dict[str, Fraction]:
    """Returns the parts of `0.7*ONE+0.3*OTHER` with their shares, which add to 1; else nothing."""
    if not PLUS.match(f"+{spec}"):
        return {}
    pairs = [part.split("*", 1) for part in PLUS.split(spec)]
    weights = {name: Fraction(weight) for weight, name in pairs}
    wrong = len(weights) < len(pairs) or not all(weights.values())
    if wrong:
        raise UserError(f"data.corpus={spec!r} has a part of no weight, or one twice")
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def _mix(mixed: dict[str, tuple[Fraction, Dataset]]) -> Dataset:
    parts = [part for _, part in mixed.values()]
    if any(part.own for part in parts):
        raise UserError("batches are in data.corpus", "Mix in your function")

    def total(split: str) -> Split:
        columns = zip(
            *(dataclasses.astuple(part.splits[split]) for part in parts), strict=True
        )
        return Split(*map(sum, columns))

    return Dataset(
        directory=Path(),
        tokenizer=parts[0].tokenizer,
        splits={name: total(name) for name in SPLITS},
        token_crc32={
            name: [part.token_crc32[name] for part in parts] for name in SPLITS
        },
        shards={},
        dtype="",
        mixed=mixed,
    )


def _open_source(data: DataConfig) -> Corpus | ReadyTokens:
    is_ready = data.corpus.startswith("tokens:")
    return open_ready_tokens(data) if is_ready else open_corpus(data.corpus)


def _find_damage(directory: Path) -> str | None:
    """Returns what is wrong with a prepared corpus: an empty text if it is not there, else None."""
    facts = directory / "prepared.json"
    if not facts.exists():
        return ""
    tree = files.read_sealed(facts)
    if tree is None:
        return "prepared.json was altered"
    total = sum(size for size, _ in tree["files"].values())
    return (
        files.find_damage(directory, tree["files"], read=total <= _READ_BYTES) or None
    )


def _load(directory: Path, tree: dict[str, Any], data: DataConfig) -> Dataset:
    facts = {name: tree[name] for name in ("token_crc32", "shards", "dtype")}
    return Dataset(
        directory=directory,
        tokenizer=tokenizers.load(directory / "tokenizer.json"),
        splits={name: Split(**tree["splits"][name]) for name in SPLITS},
        block=data.shuffle_block,
        **facts,
    )


def _partial(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.partial")


def _begun(
    directory: Path, data: DataConfig, began: int, split: str, num_tokens: float
) -> Dataset | None:
    """Returns what is prepared, if it was told since `began` and has so many tokens of a split."""
    told = _partial(directory) / PROGRESS
    tree = files.read_sealed(told) if told.stat().st_mtime_ns > began else None
    enough = tree and tree["splits"][split]["num_tokens"] >= num_tokens
    return _load(told.parent, tree, data) if tree and enough else None


def _write(
    directory: Path, corpus: Corpus | ReadyTokens, data: DataConfig, ray: Any
) -> None:
    """Prepares into a directory of its own, going on where it was cut, and renames that."""
    partial = _partial(directory)
    old = directory.with_name(f".{directory.name}.old")
    shutil.rmtree(old, ignore_errors=True)  # left by a process that stopped halfway
    if not (partial / PROGRESS).exists():
        shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(exist_ok=True)
    try:
        if isinstance(corpus, ReadyTokens):
            facts = index(corpus, data, partial)
        else:
            # A token takes two bytes, and stands for one of text or, of words, for about four.
            needed = 2 * corpus.num_bytes // (1 if data.tokenizer == "byte" else 5)
            needed -= sum(path.stat().st_size for path in partial.iterdir())
            if (free := shutil.disk_usage(partial).free) < needed:
                raise OSError(
                    f"{needed:,} more bytes are needed, and {free:,} are free"
                )
            facts = write_splits(corpus, data, partial, ray)
        if _open_source(data).fingerprint != corpus.fingerprint:
            (partial / PROGRESS).unlink(missing_ok=True)
            what = f"the text that data.corpus={data.corpus} names has changed while it was read"
            raise UserError(what, "Repeat the command")
        facts |= _describe(partial, data, facts)
        files.write_json(partial / "prepared.json", files.seal(facts))
        files.sync_tree(partial)
        if directory.exists():  # damaged; others may read from it until now
            directory.rename(old)
        partial.rename(directory)
        (directory / PROGRESS).unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        if not (partial / PROGRESS).exists():
            shutil.rmtree(partial, ignore_errors=True)


def _describe(
    directory: Path, data: DataConfig, facts: dict[str, Any]
) -> dict[str, Any]:
    """Returns statistics of what is prepared, and how it came about; README.md shows both."""
    named = "corpus", "tokenizer", "end_of_text", "val_fraction", "unique"
    options = {name: getattr(data, name) for name in named}
    command = [
        f"--config.data.{name}={shlex.quote(str(options[name]))}" for name in options
    ]
    eot = tokenizers.load(directory / "tokenizer.json").eot
    statistics = {}
    for name, split in facts["splits"].items():
        tokens = split["num_tokens"]
        size = split["num_bytes"]
        lost = split.get("num_lost", 0)
        statistics[name] = dict(
            documents=split["num_documents"], tokens=tokens, bytes=size
        )
        statistics[name]["bytes per token"] = round(size / max(tokens, 1), 4)
        statistics[name]["share of bytes lost"] = round(lost / max(size, 1), 4)
        stream = TokenStream(facts["shards"][name], facts["dtype"], directory)
        statistics[name] |= stream.count_documents(eot)
    train = statistics["train"]
    held_out = statistics["validation"]
    table = "\n".join(
        f"| {name} | {train[name]:,} | {held_out[name]:,} |" for name in train
    )
    told = options | dict(
        eot=eot, command=" ".join(command), table=table, num_dropped=0
    )
    files.write_text(directory / "README.md", README.format(**told | facts))
    digests = files.digest_folder(directory)
    for name in (PROGRESS, "prepared.json", "README.md"):  # a kill leaves the first two
        digests.pop(name, None)
    return options | {"statistics": statistics, "files": digests}
