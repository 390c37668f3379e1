"""Find the checkpoints of a run, and check them for damage."""

import re
from collections.abc import Sequence
from pathlib import Path

from gpt2.errors import UserError
from gpt2.utils import files, stores

# The parts of a checkpoint. Each has its own folder, and the folder `digests` has their digests.
ITEMS = ("params", "rest", "guard", "layout", "metrics")
WEIGHTS = ("params", "layout")  # the parts that evaluation and export read

_STEP = re.compile("0|[1-9][0-9]*")


def require_safe_path(workdir: Path) -> None:
    """Raise a UserError if checkpoints that are saved in `workdir` could not be read again.

    Orbax searches for its files with the path as a pattern. TensorStore replaces backslashes, and
    refuses bytes that are not UTF-8, which Python reads as lone surrogates.
    """
    path = workdir.resolve()
    if match := re.search(r"[*?\[\\\udc80-\udcff]", str(path)):
        raise UserError(
            f"Checkpoints cannot be saved in {path}, because the path contains {match[0]}",
            r"Choose a --workdir whose path is valid UTF-8 without the characters * ? [ \ in it",
        )


def saved_steps(workdir: Path) -> list[int]:
    """Return the steps of all checkpoints, damaged or not, in ascending order."""
    folder = workdir / "checkpoints"
    steps = list[int]()
    for path in folder.glob("*"):
        if _STEP.fullmatch(path.name):
            steps.append(int(path.name))
    return sorted(steps)


def latest_step(workdir: Path) -> int | None:
    """Return the step of the newest checkpoint, damaged or not, or None if there is none."""
    return max(saved_steps(workdir), default=None)


def newest_whole_step(workdir: Path, after: int = 0) -> tuple[int, list[str]]:
    """Return `(step, damage)` for the newest undamaged checkpoint after step `after`.

    If there is none, `step` is 0. `damage` has a message for each damaged newer checkpoint.
    """
    damage = list[str]()
    for step in reversed(saved_steps(workdir)):
        if step <= after:
            break
        message = find_damage(workdir, step)
        if not message:
            return step, damage
        damage.append(message)
    return 0, damage


def find_damage(workdir: Path, step: int, items: Sequence[str] = ITEMS) -> str:
    """Return a description of damage to a checkpoint, or an empty string if there is none.

    Only the parts named in `items` are checked. If `workdir` is the local copy of a URL, missing
    files of these parts are downloaded first.
    """
    folder = workdir / "checkpoints" / str(step)
    saved = files.read_sealed(folder / "digests" / "digests")
    if saved is None:
        return f"Checkpoint {folder} is damaged (digests/digests is missing or was altered)"
    digests = dict[str, list[int]]()
    for name, digest in saved["files"].items():
        if name.partition("/")[0] in items:
            digests[name] = digest
    stores.complete(workdir, [f"checkpoints/{step}/{name}" for name in digests])
    damage = files.find_damage(folder, digests)
    return f"Checkpoint {folder} is damaged ({damage})" if damage else ""
