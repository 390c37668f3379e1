"""The tokens of a corpus in a folder under `data.data_dir`, written once.

The folder's name contains a hash of everything that the tokens depend on. One process at a time
writes the folder under a temporary name, and renames it when it is complete.
"""

import dataclasses
import errno
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

FORMAT = 9  # version of the folder's format; if it changes, corpora are prepared again
FACTS = "prepared.json"  # written last; marks the folder as complete
TOKENIZER = "tokenizer.json"
# The file that records the progress of a preparation. If the preparation is interrupted, the next
# attempt continues from the recorded progress.
PROGRESS = "written.json"

# At each start, the files of a folder are read to detect damage if they have at most this number of
# bytes in total. Otherwise, only their sizes are compared.
_READ_BYTES = 1 << 28

# Writes tokenizer.json and, unless tokens are read in place, the tokens of both splits to a folder.
Write = Callable[[DataConfig, Path], PreparedTokens]


def prepare_tokens(data: DataConfig, source: SourceFiles, write: Write) -> TokenDataset:
    """Return the tokens of a corpus. If they are not on this machine, fetch or write them first.

    Args:
        data: the `data.` options.
        source: the files from which the corpus is read.
        write: the function that encodes the corpus and writes its tokens to a given folder.
    """
    url = prepared_url(data, source)
    directory = stores.local_folder(url).absolute()
    tokens = _read(directory)
    if tokens is None:
        lock = directory.with_name(f".{directory.name}.lock")
        try:
            if files.is_locked(lock):
                log(f"waiting for another process, which prepares {data.corpus}")
            with files.locked(lock):
                # Another process or machine may have prepared the corpus in the meantime.
                stores.fetch(url)
                tokens = _read(directory)
                if tokens is None:
                    tokens = _write(data, source, write, directory)
        except OSError as error:
            if not _prevents_writing(error, directory.parent):
                raise
            raise UserError(
                f"The prepared corpus cannot be written in {directory.parent} ({error})",
                "Free some disk space, and repeat the command to continue, or choose another "
                "folder with --config.data.data_dir or $GPT2_DATA_DIR",
            ) from error
    stores.push(url, directory)
    if lost := sum(split.num_lost for split in tokens.splits.values()):
        num_bytes = sum(split.num_bytes for split in tokens.splits.values())
        warn(
            f"the tokenizer {data.tokenizer} loses or alters {lost / num_bytes:.2%} of the bytes"
            f" of {data.corpus} ({lost:,} bytes); if some of them are in the validation split, bits"
            " per byte are not computed"
        )
    return TokenDataset.single(tokens)


def _prevents_writing(error: OSError, folder: Path) -> bool:
    """Return whether an error concerns files in `folder` or a full disk, not a file of the user."""
    if error.filename:
        return Path(os.fsdecode(error.filename)).is_relative_to(folder)
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def prepared_revisions(data: DataConfig, source: SourceFiles) -> list[str]:
    """Return the prepared revisions of a Hugging Face dataset, in the order of their preparation.

    `source` describes the dataset without a revision.
    """
    names = stores.find_folders(f"{prepared_url(data, source)}-", FACTS)
    return [name.rpartition("-")[2] for name in names]


def prepared_url(data: DataConfig, source: SourceFiles) -> str:
    """Return the path or URL of the folder for the tokens of the corpus that `source` describes.

    The folder need not exist.
    """
    tokenizer = tokenizers.check_spec(data.tokenizer, data.end_of_text)
    label = f"{data.corpus}-{Path(data.tokenizer).name}"
    label = re.sub(r"[^\w.-]+", "-", label)
    label = label[-60:].strip("-")
    options = [tokenizer, data.val_fraction, data.unique]
    key = hash_tree([FORMAT, source.fingerprint, *options])
    name = f"{label}-{key[:16]}"
    if source.revision:
        name += f"-{source.revision}"
    return f"{data_folder(data.data_dir)}/{name}"


def data_folder(data_dir: str) -> str:
    """Return the path or URL of the folder that contains all prepared corpora.

    This is `data_dir` if it is not empty, otherwise $GPT2_DATA_DIR if this variable is set,
    otherwise ~/.cache/gpt2-jax.
    """
    return data_dir or os.environ.get("GPT2_DATA_DIR") or "~/.cache/gpt2-jax"


def _read(directory: Path) -> PreparedTokens | None:
    """Return the tokens in a prepared folder, or None if the folder is incomplete or damaged."""
    facts = files.read_sealed(directory / FACTS)
    if facts is None:
        return None
    total = sum(size for size, _ in facts["files"].values())
    is_read = total <= _READ_BYTES
    if files.find_damage(directory, facts["files"], read=is_read):
        return None
    tokenizer = tokenizers.load(directory / TOKENIZER)
    splits = {name: Split(**split) for name, split in facts["splits"].items()}
    details = facts.get("details", {})
    return PreparedTokens(directory, tokenizer, splits, facts["dtype"], details)


def _write(
    data: DataConfig, source: SourceFiles, write: Write, directory: Path
) -> PreparedTokens:
    """Write a corpus to a temporary folder, and rename the folder to `directory`.

    Return the tokens. If an earlier attempt was interrupted, `write` continues it.
    """
    if (directory / FACTS).exists():
        warn(f"{directory} is damaged, so it is prepared again")
    corpus = data.corpus
    if source.revision:
        corpus += f" (revision {source.revision})"
    log(f"preparing {corpus} with the tokenizer {data.tokenizer}", sys.stdout)
    partial = directory.with_name(f".{directory.name}.partial")
    partial.mkdir(exist_ok=True)
    try:
        tokens = write(data, partial)
        for name, split in tokens.splits.items():
            # If a model is only evaluated, all of the text may be used for validation.
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
                f"The text of data.corpus={data.corpus} changed while it was read",
                "Repeat the command",
            )
        names = [TOKENIZER]
        for path in sorted(partial.glob("*.bin")):
            names.append(path.name)
        facts = {
            "dtype": tokens.dtype,
            "splits": {name: vars(split) for name, split in tokens.splits.items()},
            "files": files.digest_files(partial, names),
            "details": tokens.details,
        }
        files.write_json(partial / FACTS, files.seal(facts))
        files.sync_tree(partial)
        shutil.rmtree(directory, ignore_errors=True)  # exists only if it is damaged
        partial.rename(directory)
        map_shard.cache_clear()  # it may contain maps of damaged files
    finally:
        if not (partial / PROGRESS).exists():
            shutil.rmtree(partial, ignore_errors=True)
    (directory / PROGRESS).unlink(missing_ok=True)
    return dataclasses.replace(tokens, directory=directory)
