"""Files that others have made: how they are found, and told apart by their content."""

import glob
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from gpt2.errors import UserError
from gpt2.utils.files import reading
from gpt2.utils.stores import Remote, find, is_url

# Files of up to this size in all are hashed at every start; of more, size and time count.
_HASHED_BYTES = 1 << 26

File = Path | Remote


def find_files(pattern: str) -> Sequence[File]:
    """Returns the files that a URL or a glob (`**` included) names, in order: at least one."""
    found = find(pattern) if is_url(pattern) else _glob(pattern)
    if not found:
        raise UserError(
            f"data.corpus: no file matches {pattern!r} in {Path.cwd()}",
            "Give a file, or a glob for those of a folder, such as 'books/**/*.txt'",
        )
    return found


def _glob(pattern: str) -> list[Path]:
    names = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    # Links may lead to a file in many ways. It counts once, by its shortest name.
    by_target = dict[str, Path]()
    for name in sorted(names, key=len):
        if os.path.isfile(name):
            by_target.setdefault(os.path.realpath(name), Path(name))
    return sorted(by_target.values(), key=str)


def total_size(files: Sequence[File]) -> int:
    """Returns the bytes of files together."""
    size = 0
    for file in files:
        size += file.size if isinstance(file, Remote) else file.stat().st_size
    return size


def fingerprint(files: Sequence[File], *more: str) -> str:
    """Returns a hash of the paths of files, of what they hold, and of `more`."""
    is_read = total_size(files) <= _HASHED_BYTES
    parts = list[str | int](more)
    for file in files:
        if isinstance(file, Remote):
            parts += [file.url, file.version]
            continue
        parts.append(str(file.absolute()))
        if is_read:
            with reading(file):
                parts.append(hashlib.sha256(file.read_bytes()).hexdigest())
        else:
            about = file.stat()
            parts += [about.st_size, about.st_mtime_ns]
    return hash_of(parts)


def hash_of(tree: object) -> str:
    """Returns a hash of a tree that JSON can hold."""
    return hashlib.sha256(json.dumps(tree).encode()).hexdigest()
