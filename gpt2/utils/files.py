"""Files that are complete or absent, locks that end with their process, and digests of folders.

Digests are CRC-32: against failing disks and cut copies, not against forgery.
"""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def write_bytes(path: Path, parts: Iterable[bytes]) -> None:
    """Replaces a file completely: a reader sees the old file or the new one, even after a kill."""
    partial = path.with_name(f"{path.name}.tmp")
    with open(partial, "wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


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
    """Yields a directory that takes the name of `directory`, absent or empty, if all goes well."""
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
    with open(path) as file:
        return not _take(file.fileno())


def lock_for_good(path: Path) -> bool:
    """Takes the lock `path` until this process ends; returns False if another process holds it."""
    return _take(
        os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    )  # never closed: that would unlock


def _take(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(
            error, BlockingIOError
        )  # else a file system without locks
    return True


def digest_folder(folder: Path) -> dict[str, list[int]]:
    """Returns `[bytes, CRC-32]` of each file in a folder, by its path inside it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(4) as pool:
        sums = zip(paths, pool.map(_crc32, paths), strict=True)
        return {
            str(path.relative_to(folder)): [path.stat().st_size, crc]
            for path, crc in sums
        }


def find_damage(
    folder: Path, digests: dict[str, list[int]], *, read: bool = True
) -> str:
    """Says what is wrong with a file that differs from its digest, or nothing.

    Unless files are `read`, only their sizes are compared.
    """
    try:
        for name, (size, _) in digests.items():  # before anything is read
            if (found := (folder / name).stat().st_size) != size:
                return f"{name} has {found} bytes, not {size}"
        with ThreadPoolExecutor(4) as pool:
            sums = {
                name: pool.submit(_crc32, folder / name) for name in digests if read
            }
            for name, crc in sums.items():
                if crc.result() != digests[name][1]:
                    return f"{name} was altered"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return ""


def seal(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns a tree that JSON can hold, with its own CRC-32 as `crc32`."""
    return tree | {"crc32": _crc32_of(tree)}


def read_sealed(path: Path) -> dict[str, Any] | None:
    """Reads the JSON of a tree that `seal` has returned; None if it is missing or was altered."""
    try:
        tree = json.loads(path.read_text("utf-8"))
        crc = tree.pop("crc32")
    except (
        OSError,
        ValueError,
        RecursionError,
        AttributeError,
        LookupError,
        TypeError,
    ):
        return None
    return tree if crc == _crc32_of(tree) else None


def _crc32_of(tree: Any) -> int:
    return zlib.crc32(json.dumps(tree, sort_keys=True).encode())


def _crc32(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc
