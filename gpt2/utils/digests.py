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
        sums = zip(paths, pool.map(_crc32, paths), strict=True)
        return {str(path.relative_to(folder)): [path.stat().st_size, crc] for path, crc in sums}


def find_damage(folder: Path, digests: dict[str, list[int]], *, read: bool = True) -> str:
    """Says what is wrong with the first file that differs from its digest, or nothing.

    Files without a digest are not looked at, and nothing but sizes unless they are `read`.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            for name, (size, _) in digests.items():  # before anything is read
                if not (folder / name).is_file():
                    return f"{name} is missing"
                if (found := (folder / name).stat().st_size) != size:
                    return f"{name} has {found} bytes, not {size}"
            sums = {name: pool.submit(_crc32, folder / name) for name in (digests if read else ())}
            for name, crc in sums.items():
                if crc.result() != digests[name][1]:
                    return f"{name} was altered"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        finally:
            pool.shutdown(cancel_futures=True)
    return ""


def seal(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns a tree that JSON can hold, with its own CRC-32 as `crc32`."""
    return tree | {"crc32": _crc32_of(tree)}


def read_sealed(path: Path) -> dict[str, Any] | None:
    """Reads the JSON of a tree that `seal` has returned; None if it is missing or was altered."""
    try:
        tree = json.loads(path.read_text("utf-8"))
        crc = tree.pop("crc32")
    except (OSError, ValueError, RecursionError, AttributeError, LookupError, TypeError):
        return None
    return tree if crc == _crc32_of(tree) else None


def _crc32_of(tree: Any) -> int:
    return zlib.crc32(json.dumps(tree, sort_keys=True).encode())


def _crc32(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc
