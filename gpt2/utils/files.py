"""Files that are complete or absent, locks that end with their process, and digests of folders.

Digests are CRC-32: against failing disks and cut copies, not against forgery.
"""

import contextlib
import fcntl
import json
import os
import tempfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpt2.errors import UserError


@contextlib.contextmanager
def reading(
    what: object,
    how: str = "Leave it out, mend it or convert it to UTF-8",
    failed: str = "cannot be read",
) -> Iterator[None]:
    """Tells in one line what goes wrong while `what` is read.

    Libraries raise all kinds of errors at a damaged file, so that every kind is caught.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(f"{what} {failed} ({told})", how) from error


def write_text(path: Path, text: str) -> None:
    """Replaces a file by UTF-8 text: readers see the old one or the new one, even after a kill."""
    partial = path.with_name(f"{path.name}.tmp")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_json(path: Path, tree: object) -> None:
    """Replaces a file by a JSON value, indented for people, as `write_text` does."""
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
    if directory.is_file() or any(directory.glob("*")):
        how = "Give another directory, or remove it"
        raise UserError(f"{directory} exists already", how)
    parent = directory.parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{directory.name}-", dir=parent
    ) as scratch:
        partial = Path(scratch)
        yield partial
        partial.chmod(0o755)
        sync_tree(partial)
        os.replace(partial, directory)


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
    # It is never closed: that would unlock.
    return _take(os.open(path, os.O_RDWR | os.O_CREAT, 0o666))


def _take(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


Digests = dict[str, list[int]]  # of files by their path in a folder: bytes and CRC-32


def digest_folder(folder: Path) -> Digests:
    """Returns the digests of a folder's files."""
    names = list[str]()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            names.append(str(path.relative_to(folder)))
    return digest_files(folder, names)


def digest_files(folder: Path, names: Collection[str]) -> Digests:
    """Returns the digests of some of a folder's files."""
    with ThreadPoolExecutor(4) as pool:
        digests = pool.map(_digest, (folder / name for name in names))
        return dict(zip(names, digests, strict=True))


def find_damage(folder: Path, digests: Digests, *, read: bool = True) -> str:
    """Says what is wrong with a file that differs from its digest, or nothing.

    Unless files are `read`, only their sizes are compared.
    """
    try:
        for name, (size, _) in digests.items():  # before anything is read
            found = (folder / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes, not {size}"
        if not read:
            return ""
        for name, digest in digest_files(folder, digests).items():
            if digest != digests[name]:
                return f"{name} was altered"
    except OSError as error:
        return str(error)
    return ""


def _digest(path: Path) -> list[int]:
    crc = 0
    size = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
            size += len(block)
    return [size, crc]


def seal(tree: Mapping[str, object]) -> dict[str, object]:
    """Returns a tree that JSON can hold, with its own CRC-32 as `crc32`."""
    return {**tree, "crc32": _checksum(tree)}


def read_sealed(path: Path) -> dict | None:
    """Reads the JSON of a tree that `seal` has returned; None if it is missing or was altered."""
    with contextlib.suppress(Exception):  # a damaged file may hold any JSON, or none
        tree = json.loads(path.read_text("utf-8"))
        if tree.pop("crc32") == _checksum(tree):
            return tree
    return None


def _checksum(tree: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps(tree, sort_keys=True).encode())
