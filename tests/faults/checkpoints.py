"""Damage to the newest checkpoint of a run."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.faults.laboratory import SHORT, Broken, Laboratory, Row, attempt


def damages(lab: Laboratory) -> Iterator[Row]:
    """Damages files of a checkpoint, one at a time."""
    newest = lab.unharmed(SHORT) / "checkpoints" / str(SHORT)
    files = sorted(path.relative_to(newest) for path in newest.rglob("*") if path.is_file())
    by_size = sorted(files, key=lambda file: (newest / file).stat().st_size)
    largest = list({file.parts[0]: file for file in by_size}.values())  # of each item
    for what, damage, chosen in (
        ("a flipped byte in each file", flip, files),
        ("the largest file of each item cut to half", cut, largest),
        ("the largest file of each item missing", remove, largest),
    ):
        chosen = chosen[: lab.most]
        make = partial(damage_each, lab, damage, chosen)
        yield attempt(f"the newest checkpoint: {what}", len(chosen), make)


def damage_each(lab: Laboratory, damage: Callable[[Path], None], files: Sequence[Path]) -> float:
    """Damages each file of another copy of the run."""
    with ThreadPoolExecutor(2) as pool:
        return max(pool.map(partial(damage_one, lab, damage), files))


def damage_one(lab: Laboratory, damage: Callable[[Path], None], file: Path) -> float:
    """Damages a file of a finished run's last checkpoint; the command has to train to it again."""
    workdir = lab.directory / f"{damage.__name__}-{str(file).replace('/', '-')}"
    shutil.copytree(lab.unharmed(SHORT), workdir)
    (workdir / "samples.txt").unlink()  # else it is finished
    damage(workdir / "checkpoints" / str(SHORT) / file)
    before = sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())[-2]
    try:
        return lab.finish(workdir, SHORT, saved=before)
    except Broken as broken:
        raise Broken(f"{file}: {broken}") from broken
    finally:
        shutil.rmtree(workdir)


def flip(path: Path) -> None:
    """Changes a byte."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    """Leaves the first half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove(path: Path) -> None:
    """Leaves nothing."""
    path.unlink()
