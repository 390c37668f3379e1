"""The files that a corpus is read from, and a hash of their content."""

import glob
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from gpt2.errors import UserError
from gpt2.utils import stores
from gpt2.utils.files import reading
from gpt2.utils.stores import Remote

# At each start, the content of a corpus's local files is hashed if all its files have at most this
# number of bytes in total. Otherwise, only sizes and modification times are hashed.
_HASHED_BYTES = 1 << 26

File = Path | Remote


class SourceFiles:
    """The files that a corpus is read from, in a fixed order.

    `find` returns the files. `labels` state how the files are read, or identify a source without
    files, such as a dataset on the Hugging Face hub. `revision` is the commit of such a dataset.
    """

    def __init__(
        self, find: Callable[[], Sequence[File]], *labels: str, revision: str = ""
    ):
        self.revision = revision
        # Bytes read in the newest iteration over the files, or 0 if the reader does not count them.
        self.bytes_read = 0
        self._find = find
        self._labels = labels
        self.paths = find()
        self.num_bytes = sum(map(_size, self.paths))
        # If files or labels change, the fingerprint changes, and the text is prepared again.
        self.fingerprint = _fingerprint(self.paths, labels)

    def have_changed(self) -> bool:
        """Return whether the files or their content have changed since they were opened."""
        return _fingerprint(self._find(), self._labels) != self.fingerprint


def match_files(pattern: str) -> Sequence[File]:
    """Return the files that match `pattern`, in sorted order.

    `pattern` is a URL or a glob, and may contain `**`. If no file matches, raise a UserError.
    """
    find = stores.find if stores.is_url(pattern) else find_paths
    # If nothing matches, take brackets literally, as in the name `[2024] notes`.
    files = find(pattern) or find(pattern.replace("[", "[[]"))
    if not files:
        is_relative = not (stores.is_url(pattern) or Path(pattern).is_absolute())
        where = f" in {Path.cwd()}" if is_relative else ""
        raise UserError(
            f"data.corpus: no file matches {pattern!r}{where}",
            "Check the path. `**` matches folders, as in 'FOLDER/**/*.txt'",
        )
    return files


def find_paths(pattern: str) -> list[Path]:
    """Return the file whose path is `pattern`, if there is one.

    Otherwise, return the files that match `pattern` as a glob.
    """
    pattern = os.path.expanduser(pattern)
    if os.path.isfile(pattern):
        return [Path(pattern)]
    names = sorted(glob.glob(pattern, recursive=True))
    # Several links may lead to one file. The file counts once, under its shortest name.
    by_target = dict[str, Path]()
    for name in sorted(names, key=len):
        if not os.path.exists(name):
            raise UserError(
                f"{name} is a link to {os.path.realpath(name)}, which does not exist",
                "Restore the file, or remove the link",
            )
        if os.path.isfile(name):
            by_target.setdefault(os.path.realpath(name), Path(name))
    return sorted(by_target.values(), key=str)


def _size(file: File) -> int:
    return file.size if isinstance(file, Remote) else file.stat().st_size


def _fingerprint(files: Sequence[File], labels: Sequence[str]) -> str:
    """Return a hash of the labels, and of the paths and the content of files.

    For a remote file, the hash contains the file's version instead of the content. If all files
    together have more than _HASHED_BYTES, the hash contains the sizes and modification times of
    local files instead of their content.
    """
    is_read = sum(map(_size, files)) <= _HASHED_BYTES
    parts = list[str | int](labels)
    for file in files:
        if isinstance(file, Remote):
            parts += [file.url, file.version]
            continue
        parts.append(str(file.absolute()))
        if is_read:
            with reading(file):
                parts.append(hashlib.sha256(file.read_bytes()).hexdigest())
        else:
            status = file.stat()
            parts += [status.st_size, status.st_mtime_ns]
    return hash_tree(parts)


def hash_tree(tree: object) -> str:
    """Return the SHA-256, in hexadecimal, of a value that JSON can represent."""
    return hashlib.sha256(json.dumps(tree).encode()).hexdigest()
