"""A prepared corpus, and its preparation: documents -> tokens -> records, once.

A prepared corpus is a directory under `data.data_dir`. A hash of all that the corpus depends on is
part of its name. One process at a time writes it, under another name, and renames it when it is
complete.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from gpt2.config import DataConfig
from gpt2.data import records, shards
from gpt2.data import tokenizer as tokenizers
from gpt2.data.corpus import Corpus, open_corpus
from gpt2.data.splits import SPLITS, write_splits
from gpt2.data.tokenizer_names import check_spec
from gpt2.errors import UserError, tell, warn
from gpt2.utils import digests, files
from gpt2.utils.text import format_bytes

FORMAT = 3  # of a prepared directory; another number prepares everything anew

# Files of up to this size in all are read at every start, to notice damage. Of more, sizes alone
# are looked at.
_READ_BYTES = 1 << 28


@dataclass(frozen=True)
class Split:
    """What a split holds.

    Attributes:
        num_tokens: length of the token stream, end-of-text tokens included.
        num_bytes: UTF-8 bytes of the documents' text; end-of-text tokens count none.
        num_documents: documents; the two halves of a single text count as one each.
    """

    num_tokens: int
    num_bytes: int
    num_documents: int

    @property
    def targets_per_byte(self) -> float:
        """Tokens to predict, all but the first, for each byte of text."""
        return (self.num_tokens - 1) / self.num_bytes


@dataclass(frozen=True)
class Dataset:
    """A prepared corpus.

    Attributes:
        directory: where it lies.
        tokenizer: turns text into its tokens and back.
        splits: `train` and `validation`.
        zlib_bits_per_byte: bits that zlib at level 9 needs for a byte of the validation text,
            documents one after the other: a baseline for the model.
        token_crc32: of each split's tokens.
        shard_files: ready token shards that are read in place, instead of records.
    """

    directory: Path
    tokenizer: tokenizers.Tokenizer
    splits: dict[str, Split]
    zlib_bits_per_byte: float
    token_crc32: dict[str, int]
    shard_files: dict[str, list] | None = None

    def open(self, split: str) -> records.TokenStream:
        """Returns the token stream of `train` or `validation`."""
        if self.shard_files is not None:
            return shards.ShardStream(self.shard_files[split])
        return records.RecordStream(self.directory, split, self.splits[split].num_tokens)


def data_root(data_dir: str) -> Path:
    """Returns where prepared corpora lie: `data_dir`, $GPT2_DATA_DIR or ~/.cache/gpt2-jax."""
    chosen = data_dir or os.environ.get("GPT2_DATA_DIR") or "~/.cache/gpt2-jax"
    return Path(chosen).expanduser().absolute()


def prepare(data: DataConfig, *, show_progress: bool = True) -> Dataset:
    """Returns the prepared corpus of a config, and prepares it first if it is not prepared yet.

    Args:
        data: the `data.` options.
        show_progress: says so if it prepares, and how far it is.

    Raises:
        UserError: the corpus, the tokenizer, the validation share or the directory cannot be used.
    """
    corpus = _open_source(data)
    tokenizer_identity = check_spec(data.tokenizer)
    layout = [FORMAT, records.RECORD_TOKENS]
    parts = [*layout, corpus.fingerprint, tokenizer_identity, data.val_fraction]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    label = re.sub(r"[^\w.-]+", "-", f"{data.corpus}-{Path(data.tokenizer).name}")[-60:].strip("-")
    directory = data_root(data.data_dir) / f"{label}-{key}"
    if _find_damage(directory) is not None:
        try:
            with files.locked(directory.with_name(f".{directory.name}.lock")):
                # Another process may have prepared it meanwhile.
                if (damage := _find_damage(directory)) is not None:
                    if damage:
                        warn(f"{directory} is damaged ({damage}), and is prepared anew")
                    if show_progress:
                        tell(f"preparing {data.corpus} for {data.tokenizer}, once", sys.stdout)
                    _write(directory, corpus, data, show_progress)
        except OSError as error:
            raise UserError(
                f"Cannot write the prepared corpus in {directory.parent} ({error})",
                "Choose a directory with room by --config.data.data_dir=DIR or $GPT2_DATA_DIR",
            ) from error
    return _load(directory)


def _open_source(data: DataConfig) -> Corpus | shards.Shards:
    """Finds the documents, or the ready tokens, that a config names."""
    ready_tokens = data.corpus.startswith("tokens:")
    return shards.open_shards(data) if ready_tokens else open_corpus(data.corpus)


def _find_damage(directory: Path) -> str | None:
    """Returns what is wrong with a prepared corpus: an empty text if it is not there, else None."""
    facts = directory / "prepared.json"
    if not facts.exists():
        return ""
    tree = digests.read_sealed(facts)
    if tree is None:
        return "prepared.json was altered"
    total = sum(size for size, _ in tree["files"].values())
    return digests.find_damage(directory, tree["files"], read=total <= _READ_BYTES) or None


def _load(directory: Path) -> Dataset:
    tree = json.loads((directory / "prepared.json").read_text(encoding="utf-8"))
    return Dataset(
        directory=directory,
        tokenizer=tokenizers.load(directory / "tokenizer.json"),
        splits={name: Split(**tree["splits"][name]) for name in SPLITS},
        zlib_bits_per_byte=tree["zlib_bits_per_byte"],
        token_crc32=tree["token_crc32"],
        shard_files=tree.get("shard_files"),
    )


def _write(
    directory: Path, corpus: Corpus | shards.Shards, data: DataConfig, show_progress: bool
) -> None:
    """Prepares into a directory of its own and renames it to its place."""
    partial = directory.with_name(f".{directory.name}.partial")
    old = directory.with_name(f".{directory.name}.old")
    for broken in (partial, old):  # left by a process that stopped halfway
        shutil.rmtree(broken, ignore_errors=True)
    partial.mkdir()
    try:
        if isinstance(corpus, shards.Shards):
            facts = shards.index(corpus, partial, data.splits)
        else:
            _check_room(partial, corpus)
            facts = write_splits(corpus, data, partial, show_progress)
        if _open_source(data).fingerprint != corpus.fingerprint:
            what = f"the text that data.corpus={data.corpus} names has changed while it was read"
            raise UserError(what, "Repeat the command")
        about = {
            "corpus": data.corpus,
            "tokenizer": data.tokenizer,
            "val_fraction": data.val_fraction,
            "files": digests.digest_folder(partial),
        }
        files.write_json(partial / "prepared.json", digests.seal(about | facts))
        files.sync_directory(partial)
        if directory.exists():  # damaged; others may read from it until now
            directory.rename(old)
        partial.rename(directory)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_room(directory: Path, corpus: Corpus) -> None:
    """Raises an OSError unless the disk has room for the tokens.

    A token takes two bytes and stands for a byte of text or more. All of them therefore take at
    most twice the size of the text.
    """
    free = shutil.disk_usage(directory).free
    if free < 2 * corpus.num_bytes:
        needed = format_bytes(2 * corpus.num_bytes)
        raise OSError(f"{needed} are needed, and {format_bytes(free)} are free")
