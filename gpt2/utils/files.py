"""Atomic writes, locks that are released when the process ends, and digests of folders.

Digests are CRC-32. They detect failing disks and incomplete copies, but not deliberate changes.
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

from gpt2.errors import UserError, first_line, located


@contextlib.contextmanager
def reading(
    what: object,
    remedy: str = "Repair the file, convert it to UTF-8 or leave it out",
    failed: str = "cannot be read",
) -> Iterator[None]:
    """Turn any exception in the body of `with` into the UserError "WHAT FAILED (REASON). REMEDY".

    Every type of exception is caught, because a damaged file can make a library raise any type. A
    UserError that the body raises keeps its message, to which "WHAT: " is added at the beginning.
    Nothing is added if the message already contains `what`, or comes from an inner `reading`.
    """
    with located(what):
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            reason = _reason(error).partition("\n")[0]
            raise UserError(f"{what} {failed} ({reason})", remedy) from error


def _reason(error: Exception) -> str:
    """Return the reason of an error for the message of `reading`.

    It does not contain the path, because the message already does.
    """
    if isinstance(error, KeyError):
        return f"{error} is missing"
    if isinstance(error, FileNotFoundError):
        # If fsspec raised this error, its cause is the server's error, which says more.
        return str(error.__cause__ or error.strerror or "it does not exist")
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error)


def write_text(path: Path, text: str) -> None:
    """Replace the content of a file with `text` in UTF-8, atomically.

    Readers see the old or the new text, even if this process is killed in the meantime.
    """
    partial = path.with_name(f"{path.name}.tmp")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_json(path: Path, tree: object) -> None:
    """Replace the content of a file with the value `tree` as indented JSON, as in `write_text`."""
    write_text(path, json.dumps(tree, indent=2) + "\n")


def sync_tree(directory: Path) -> None:
    """Flush a directory and everything in it from the operating system's cache to the disk.

    Call this before a rename that makes the files visible, so that a power loss cannot damage them.
    """
    for path in (*directory.rglob("*"), directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory, and rename it to `directory` unless the body raises an error.

    Raise a UserError if `directory` is a file or a directory that is not empty. If it is a symbolic
    link, the target of the link is used.
    """
    directory = directory.resolve()
    if directory.is_file() or any(directory.glob("*")):
        remedy = "Give another directory, or remove this one"
        raise UserError(f"{directory} already exists", remedy)
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
    """Wait until no other process holds the lock on the file `path`. Hold it during the body.

    On a file system without locks, do not wait.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock on the file `path`. It may be this process."""
    if not path.exists():
        return False
    is_writable = os.access(path, os.W_OK)
    # On NFS, only a file that is open for writing can be locked.
    with open(path, "r+" if is_writable else "r") as file:
        return not try_lock(file.fileno())


def lock_for_good(path: Path) -> bool:
    """Take the lock on the file `path`, and hold it until this process ends.

    Return whether this succeeded: False if another process holds the lock. On a file system without
    locks, return True.
    """
    # The file is never closed, because that would release the lock.
    return try_lock(os.open(path, os.O_RDWR | os.O_CREAT, 0o666))


def try_lock(file: int) -> bool:
    """Take the lock on an open file. Return False if another process holds it.

    On a file system without locks, return True.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system does not support locks
        pass
    return True


Digests = dict[str, list[int]]  # path in the folder -> [size in bytes, CRC-32]


def digest_folder(folder: Path) -> Digests:
    """Return the digests of all files in a folder and its subfolders, by relative path.

    A digest is a list: the size of the file in bytes, and its CRC-32.
    """
    names = list[str]()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            names.append(str(path.relative_to(folder)))
    return digest_files(folder, names)


def digest_files(folder: Path, names: Collection[str]) -> Digests:
    """Return the digests of the files in `folder` with the relative paths `names`, by path.

    A digest is a list: the size of the file in bytes, and its CRC-32.
    """
    with ThreadPoolExecutor(4) as pool:
        digests = pool.map(_digest, (folder / name for name in names))
        return dict(zip(names, digests, strict=True))


def find_damage(folder: Path, digests: Digests, *, read: bool = True) -> str:
    """Return a description of the first file in a folder that differs from its digest.

    If no file differs, return an empty string. With `read=False`, compare only the sizes, because
    reading large files takes long.
    """
    try:
        # All sizes are compared first, because reading the files takes long.
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
    """Return `tree`, a JSON object, with the additional entry `crc32`: the CRC-32 of the others."""
    return {**tree, "crc32": _checksum(tree)}


def read_sealed(path: Path) -> dict | None:
    """Return the object in a file that was written with `seal`, without its entry `crc32`.

    If the file is missing or was altered, return None.
    """
    # A damaged file may contain different JSON, or none.
    with contextlib.suppress(Exception):
        tree = json.loads(path.read_text("utf-8"))
        if tree.pop("crc32") == _checksum(tree):
            return tree
    return None


def _checksum(tree: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps(tree, sort_keys=True).encode())
