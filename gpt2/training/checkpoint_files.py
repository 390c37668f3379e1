"""Find the checkpoints of a run, and damage to them."""

import re
from collections.abc import Sequence
from pathlib import Path

from gpt2.utils import files, stores

# The parts of a checkpoint, one folder each. The folder `digests` next to them has their digests.
ITEMS = ("params", "rest", "guard", "layout", "metrics")
WEIGHTS = ("params", "layout")  # the parts that evaluation and export read

_STEP = re.compile("0|[1-9][0-9]*")


def saved_steps(workdir: Path) -> list[int]:
    """Return the steps of all checkpoints, complete or not, in ascending order."""
    folder = workdir / "checkpoints"
    steps = list[int]()
    for path in folder.glob("*"):
        if _STEP.fullmatch(path.name):
            steps.append(int(path.name))
    return sorted(steps)


def latest_step(workdir: Path) -> int | None:
    """Return the newest step that a run has saved, or None."""
    return max(saved_steps(workdir), default=None)


def newest_whole_step(workdir: Path, after: int = 0) -> tuple[int, list[str]]:
    """Return the newest step after `after` with an undamaged checkpoint, or 0.

    The second value describes the damage of newer checkpoints.
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
    """Return a clause on why `items` of a checkpoint cannot be used, or an empty string."""
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
