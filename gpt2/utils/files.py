"""Files that are complete or absent, and locks that end with their process."""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def write_bytes(path: Path, parts: Iterable[bytes]) -> None:
    """Replaces a file completely: a reader sees the old file or the new one, even after a kill.

    The new file is on the disk itself before it takes the old one's name. Links are followed, and
    what is not a regular file, such as /dev/stdout, is written to.
    """
    path = Path(os.path.realpath(path))
    is_regular = path.is_file() or not path.exists()
    target = path.with_name(f"{path.name}.tmp") if is_regular else path
    with open(target, "wb") as file:
        file.writelines(parts)
        file.flush()
        if is_regular:
            os.fsync(file.fileno())
            os.replace(target, path)


def write_text(path: Path, text: str) -> None:
    """Replaces a file by UTF-8 text, as `write_bytes` does."""
    write_bytes(path, [text.encode("utf-8")])


def write_json(path: Path, tree: Any) -> None:
    """Replaces a file by a JSON value, indented for people, as `write_bytes` does."""
    write_text(path, json.dumps(tree, indent=2) + "\n")


def sync_tree(directory: Path) -> None:
    """Brings a directory and all in it to the disk itself, before a rename makes them visible."""
    for path in (*directory.rglob("*"), directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """Yields a directory that takes the name of `directory` at the end, if all went well.

    `directory` does not exist yet or is empty; its parents are created.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        yield partial
        partial.chmod(0o755)
        sync_tree(partial)
        os.replace(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits until no other process holds the lock `path`, and holds it while inside."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_locked(path: Path) -> bool:
    """Returns whether another process holds the lock `path`."""
    if not path.exists():
        return False
    with open(path, "rb") as file:
        return not _take(file.fileno())


def lock_for_good(path: Path) -> bool:
    """Takes the lock `path` until this process ends; returns False if another process holds it."""
    return _take(os.open(path, os.O_RDWR | os.O_CREAT, 0o666))  # never closed: that would unlock


def _take(file: int) -> bool:
    with contextlib.suppress(OSError):  # of a file system without locks
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
