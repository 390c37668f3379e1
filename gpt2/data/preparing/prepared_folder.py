"""A corpus as tokens in a folder under `data.data_dir`, written once.

A hash of everything that the tokens depend on is part of the folder's name. One process at a time
writes it, under another name, and renames it when it is complete.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from gpt2.config import DataConfig
from gpt2.data import tokenizer as tokenizers
from gpt2.data.loading.token_batches import TokenDataset
from gpt2.data.source_files import SourceFiles, hash_tree
from gpt2.data.tokens import PreparedTokens, Split, map_shard
from gpt2.errors import UserError, log, warn
from gpt2.utils import files, stores

FORMAT = 8  # of a folder. With another number, every corpus is prepared again
FACTS = "prepared.json"  # is written last, and marks the folder as complete
TOKENIZER = "tokenizer.json"
# What a preparation has written so far, from which it continues.
PROGRESS = "written.json"

# Files of up to this size in all are read at each start to notice damage; of larger ones, only
# their sizes are compared.
_READ_BYTES = 1 << 28

# Writes tokenizer.json and the tokens of both splits into a folder.
Write = Callable[[DataConfig, Path], PreparedTokens]


def prepare_tokens(data: DataConfig, source: SourceFiles, write: Write) -> TokenDataset:
    """Return the tokens of a corpus, which are written or fetched first if this machine has none.

    Args:
        data: the options.
        source: what the corpus is read from.
        write: the function that writes the folder.
    """
    url = prepared_url(data, source.fingerprint)
    directory = stores.local_folder(url).absolute()
    tokens = _read(directory)
    if tokens is None:
        try:
            with files.locked(directory.with_name(f".{directory.name}.lock")):
                # Another process or machine may have prepared it since.
                stores.fetch(url)
                tokens = _read(directory)
                if tokens is None:
                    tokens = _write(data, source, write, directory)
        except OSError as error:
            raise UserError(
                f"The prepared corpus cannot be written in {directory.parent} ({error})",
                "Make room, and repeat the command, which continues. --config.data.data_dir "
                "and $GPT2_DATA_DIR name another folder",
            ) from error
    stores.push(url, directory)
    if lost := sum(split.num_lost for split in tokens.splits.values()):
        num_bytes = sum(split.num_bytes for split in tokens.splits.values())
        warn(
            f"{data.tokenizer} does not know or alters {lost / num_bytes:.2%} of the bytes of "
            f"{data.corpus} ({lost:,}): bits per byte are not computed"
        )
    return TokenDataset.single(tokens)


def prepared_url(data: DataConfig, fingerprint: str) -> str:
    """Return the folder, or the URL, that holds the tokens of a corpus once it is prepared."""
    tokenizer = tokenizers.check_spec(data.tokenizer, data.end_of_text)
    label = f"{data.corpus}-{Path(data.tokenizer).name}"
    label = re.sub(r"[^\w.-]+", "-", label)
    label = label[-60:].strip("-")
    key = hash_tree([FORMAT, fingerprint, tokenizer, data.val_fraction, data.unique])
    return f"{data_folder(data.data_dir)}/{label}-{key[:16]}"


def data_folder(data_dir: str) -> str:
    """Return where prepared corpora are: `data_dir`, $GPT2_DATA_DIR or ~/.cache/gpt2-jax."""
    return data_dir or os.environ.get("GPT2_DATA_DIR") or "~/.cache/gpt2-jax"


def _read(directory: Path) -> PreparedTokens | None:
    """Return the tokens of a folder, or None unless it is complete and undamaged."""
    facts = files.read_sealed(directory / FACTS)
    if facts is None:
        return None
    total = sum(size for size, _ in facts["files"].values())
    is_read = total <= _READ_BYTES
    if files.find_damage(directory, facts["files"], read=is_read):
        return None
    tokenizer = tokenizers.load(directory / TOKENIZER)
    splits = {name: Split(**split) for name, split in facts["splits"].items()}
    return PreparedTokens(directory, tokenizer, splits, facts["dtype"])


def _write(
    data: DataConfig, source: SourceFiles, write: Write, directory: Path
) -> PreparedTokens:
    """Write a corpus into another folder, continuing an earlier attempt, and rename it."""
    if (directory / FACTS).exists():
        warn(f"{directory} is damaged, and is prepared again")
    log(f"preparing {data.corpus} for {data.tokenizer}, once", sys.stdout)
    partial = directory.with_name(f".{directory.name}.partial")
    partial.mkdir(exist_ok=True)
    try:
        tokens = write(data, partial)
        for name, split in tokens.splits.items():
            # A model that is only scored may use all of the text for validation.
            is_read = name == "validation" or data.val_fraction < 1
            if is_read and split.num_tokens < 2:
                raise UserError(
                    f"data.val_fraction={data.val_fraction} leaves no token to predict in the "
                    f"{name} split of data.corpus={data.corpus}",
                    "Choose another fraction, or a longer text",
                )
        if source.have_changed():
            (partial / PROGRESS).unlink(missing_ok=True)
            raise UserError(
                f"The text that data.corpus={data.corpus} names has changed while it was read",
                "Repeat the command",
            )
        names = [TOKENIZER]
        for path in sorted(partial.glob("*.bin")):
            names.append(path.name)
        facts = {
            "dtype": tokens.dtype,
            "splits": {name: vars(split) for name, split in tokens.splits.items()},
            "files": files.digest_files(partial, names),
        }
        files.write_json(partial / FACTS, files.seal(facts))
        files.sync_tree(partial)
        shutil.rmtree(directory, ignore_errors=True)  # it is damaged, if it is there
        partial.rename(directory)
        map_shard.cache_clear()  # of the damaged files, if they were open
    finally:
        if not (partial / PROGRESS).exists():
            shutil.rmtree(partial, ignore_errors=True)
    (directory / PROGRESS).unlink(missing_ok=True)
    return PreparedTokens(directory, tokens.tokenizer, tokens.splits, tokens.dtype)
