"""The folders of a run's checkpoints: which there are, and which are whole."""

import re
from collections.abc import Sequence
from pathlib import Path

from gpt2.utils import files, stores

# The parts of a checkpoint, each a folder. A folder `digests` beside them holds their digests.
ITEMS = ("params", "rest", "guard", "layout", "metrics")
WEIGHTS = ("params", "layout")  # what other programs than training read

_STEP = re.compile("0|[1-9][0-9]*")


def saved_steps(workdir: Path) -> list[int]:
    """Returns the steps of which a run has checkpoints, whole or not, ascending."""
    folder = workdir / "checkpoints"
    steps = list[int]()
    for path in folder.glob("*"):
        if _STEP.fullmatch(path.name):
            steps.append(int(path.name))
    return sorted(steps)


def latest_step(workdir: Path) -> int | None:
    """Returns the newest step that a run has saved, or None."""
    return max(saved_steps(workdir), default=None)


def newest_whole_step(workdir: Path, after: int = 0) -> tuple[int, list[str]]:
    """Returns the newest step beyond `after` whose checkpoint is whole, or 0.

    Also what is wrong with those that are newer.
    """
    damage = list[str]()
    for step in reversed(saved_steps(workdir)):
        if step <= after:
            break
        found = find_damage(workdir, step)
        if not found:
            return step, damage
        damage.append(found)
    return 0, damage


def find_damage(workdir: Path, step: int, items: Sequence[str] = ITEMS) -> str:
    """Returns why the `items` of a checkpoint cannot be used, as a clause, or an empty text."""
    folder = workdir / "checkpoints" / str(step)
    saved = files.read_sealed(folder / "digests" / "digests")
    if saved is None:
        return f"checkpoint {folder} is damaged (digests/digests is missing or was altered)"
    found = dict[str, list[int]]()
    for name, digest in saved["files"].items():
        if name.partition("/")[0] in items:
            found[name] = digest
    stores.complete(workdir, [f"checkpoints/{step}/{name}" for name in found])
    damage = files.find_damage(folder, found)
    return f"checkpoint {folder} is damaged ({damage})" if damage else ""
