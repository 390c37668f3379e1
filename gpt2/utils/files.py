"""Files that are complete or absent, and locks that end with their process."""

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def write_bytes(path: Path, pieces: Iterable[bytes]) -> None:
    """Replaces a file completely: a reader sees the old file or the new one, even after a kill.

    The new file is on the disk itself before it takes the old one's name. Links are followed, and
    what is not a regular file, such as /dev/stdout, is written to.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        with open(path, "wb") as stream:
            stream.writelines(pieces)
        return
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_text(path: Path, text: str) -> None:
    """Replaces a file by UTF-8 text, as `write_bytes` does."""
    write_bytes(path, [text.encode("utf-8")])


def write_json(path: Path, tree: Any) -> None:
    """Replaces a file by a JSON value, indented for people, as `write_bytes` does."""
    write_text(path, json.dumps(tree, indent=2) + "\n")


def unused(path: Path) -> Path:
    """Returns a path of which nothing exists yet: `path`, or `path` with -1, -2, ... behind it."""
    names = itertools.chain([path.name], (f"{path.name}-{i}" for i in itertools.count(1)))
    return next(new for name in names if not (new := path.with_name(name)).exists())


def sync_tree(directory: Path) -> None:
    """Brings a directory, its files and those of all folders in it to the disk itself."""
    for folder in (*(path for path in directory.rglob("*") if path.is_dir()), directory):
        sync_directory(folder)


@contextlib.contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """Yields a directory that takes the name of `directory` at the end, if all went well.

    Args:
        directory: does not exist yet or is empty; its parents are created.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        yield partial
        partial.chmod(0o755)
        sync_directory(partial)
        os.replace(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sync_directory(directory: Path) -> None:
    """Brings a directory and its files to the disk itself, before a rename makes them visible."""
    for path in [*directory.iterdir(), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits until no other process holds the lock `path`, and holds it while inside.

    The lock ends with its process, however that ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_locked(path: Path) -> bool:
    """Returns whether another process holds the lock `path`."""
    if not path.exists():
        return False
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False


def lock_for_good(path: Path) -> bool:
    """Takes the lock `path` until this process ends, without waiting.

    Returns:
        False if another process holds it, else True; True also if the file system has no locks.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # never closed: closing would unlock
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return False
    except OSError:
        return True
    return True
