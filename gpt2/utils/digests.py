"""Digests of a folder's files, by which damage to them is noticed.

A digest is CRC-32: it tells every change of up to 32 neighbouring bits, and misses any other with
a chance of 2**-32. It protects against failing disks and cut copies, not against forgery.
"""

import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 1 << 22
_THREADS = 4


def digest_folder(folder: Path) -> dict[str, list[int]]:
    """Returns `[bytes, CRC-32]` of each file in a folder, by its path inside it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(_THREADS) as pool:
        sums = list(pool.map(_crc32, paths))
    return {
        str(path.relative_to(folder)): [path.stat().st_size, crc]
        for path, crc in zip(paths, sums, strict=True)
    }


def find_damage(folder: Path, digests: dict[str, list[int]], *, read: bool = True) -> str:
    """Compares a folder with digests of its files. Files without a digest are not looked at.

    Args:
        folder: where the files are.
        digests: of `digest_folder`.
        read: compare what the files hold too, not their sizes alone.

    Returns:
        What is wrong with the first file that differs, or an empty text.
    """
    try:
        for name, (size, _) in digests.items():  # before anything is read
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if (found := path.stat().st_size) != size:
                return f"{name} has {found} bytes, not {size}"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    with ThreadPoolExecutor(_THREADS) as pool:
        sums = [(name, pool.submit(_crc32, folder / name)) for name in (digests if read else ())]
        for name, crc in sums:
            try:
                damage = "" if crc.result() == digests[name][1] else f"{name} was altered"
            except OSError as error:
                damage = f"{name} cannot be read: {error.strerror}"
            if damage:
                pool.shutdown(cancel_futures=True)
                return damage
    return ""


def seal(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns a tree that JSON can hold, with its own CRC-32 as `crc32`."""
    return tree | {"crc32": _crc32_of(tree)}


def read_sealed(path: Path, *, unsealed: bool = False) -> dict[str, Any] | None:
    """Reads the JSON of a tree that `seal` has returned, without its CRC-32.

    Args:
        path: of the file.
        unsealed: believe a tree that carries no CRC-32.

    Returns:
        The tree, or None if the file is missing, cannot be read, or was altered.
    """
    try:
        tree = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(tree, dict):
        return None
    if unsealed and "crc32" not in tree:
        return tree
    crc = tree.pop("crc32", None)
    return tree if crc == _crc32_of(tree) else None


def _crc32_of(tree: Any) -> int:
    return zlib.crc32(json.dumps(tree, sort_keys=True).encode())


def _crc32(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc
