"""Files that are whole or absent, locks that end with their process, and digests of folders.

Digests are CRC-32. They detect failing disks and incomplete copies, not forgery.
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
    remedy: str = "Leave it out, repair it or convert it to UTF-8",
    failed: str = "cannot be read",
) -> Iterator[None]:
    """Turn any exception into a UserError, "WHAT cannot be read (REASON)".

    Every type is caught, because libraries raise errors of any type at a damaged file.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = _reason(error).partition("\n")[0]
        raise UserError(f"{what} {failed} ({reason})", remedy) from error


def _reason(error: Exception) -> str:
    """Return what went wrong, without the path, which the message has already."""
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    if isinstance(error, FileNotFoundError):
        # fsspec hides the answer of a server behind it.
        return str(error.__cause__ or error.strerror or "it does not exist")
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip() or type(error).__name__


def write_text(path: Path, text: str) -> None:
    """Replace a file by UTF-8 text: readers see the old or the new text, even after a kill."""
    partial = path.with_name(f"{path.name}.tmp")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_json(path: Path, tree: object) -> None:
    """Replace a file by an indented JSON value, as `write_text` does."""
    write_text(path, json.dumps(tree, indent=2) + "\n")


def sync_tree(directory: Path) -> None:
    """Flush a directory and all its files to the disk, before a rename makes them visible."""
    for path in (*directory.rglob("*"), directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """Yield an empty directory, and move it to `directory`, absent or empty, on success."""
    if directory.is_file() or any(directory.glob("*")):
        remedy = "Give another directory, or remove it"
        raise UserError(f"{directory} exists already", remedy)
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
    """Hold the lock `path` inside the context, after other processes have released it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_locked(path: Path) -> bool:
    """Return whether another process holds the lock `path`."""
    if not path.exists():
        return False
    with open(path) as file:
        return not _try_lock(file.fileno())


def lock_for_good(path: Path) -> bool:
    """Hold the lock `path` until this process ends; return False if another process holds it."""
    # The file is never closed, because that would release the lock.
    return _try_lock(os.open(path, os.O_RDWR | os.O_CREAT, 0o666))


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        pass
    return True


Digests = dict[str, list[int]]  # bytes and CRC-32 of each file, by its path in a folder


def digest_folder(folder: Path) -> Digests:
    """Return the digests of all files of a folder."""
    names = list[str]()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            names.append(str(path.relative_to(folder)))
    return digest_files(folder, names)


def digest_files(folder: Path, names: Collection[str]) -> Digests:
    """Return the digests of the named files of a folder."""
    with ThreadPoolExecutor(4) as pool:
        digests = pool.map(_digest, (folder / name for name in names))
        return dict(zip(names, digests, strict=True))


def find_damage(folder: Path, digests: Digests, *, read: bool = True) -> str:
    """Describe the first file that differs from its digest; empty if there is none.

    With `read=False` only sizes are compared.
    """
    try:
        # Sizes first, because reading takes long.
        for name, digest in digests.items():
            size = (folder / name).stat().st_size
            if size != digest[0]:
                return f"{name} has {size} bytes, not {digest[0]}"
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
    """Return a JSON object with its own CRC-32 as `crc32`."""
    return {**tree, "crc32": _checksum(tree)}


def read_sealed(path: Path) -> dict | None:
    """Read the JSON of an object from `seal`; None if the file is missing or was altered."""
    with contextlib.suppress(Exception):  # a damaged file may hold other JSON, or none
        tree = json.loads(path.read_text("utf-8"))
        if tree.pop("crc32") == _checksum(tree):
            return tree
    return None


def _checksum(tree: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps(tree, sort_keys=True).encode())
