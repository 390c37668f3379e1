"""The folders of a run's checkpoints: which there are, and which are whole."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from gpt2.errors import MALFORMED
from gpt2.utils import digests, files

# The parts of a checkpoint, each a folder. A folder `digests` beside them holds their digests.
ITEMS = ("params", "rest", "layout", "metrics")
WEIGHTS = ("params", "layout")  # what other programs than training read
_UNSAVED = ".none-saved"
METRIC = "eval/loss"  # by which the best checkpoint is known
_NOTES = "_CHECKPOINT_METADATA"  # Orbax writes it last, so it has no digest; Orbax minds no loss
# The file, the key and the type of what each item in JSON holds.
_JSON = {
    "layout": ("layout/metadata", "scan_layers", bool),
    "metrics": ("metrics/metrics", METRIC, float),
}


def latest_step(workdir: Path | str) -> int | None:
    """Returns the newest step that a run has saved, or None."""
    return max(saved_steps(workdir), default=None)


def newest_whole_step(workdir: Path | str, after: int = -1, *, read: bool = True) -> int | None:
    """Returns the newest step beyond `after` whose checkpoint is whole, or None.

    `read` is as for `find_damage`.
    """
    steps = sorted((step for step in saved_steps(workdir) if step > after), reverse=True)
    return next((step for step in steps if not find_damage(workdir, step, read=read)), None)


def set_aside(workdir: Path, after: int) -> list[Path]:
    """Moves checkpoints beyond step `after` to `workdir/damaged`, and returns where they are."""
    return [move_aside(workdir, step) for step in saved_steps(workdir) if step > after]


def move_aside(workdir: Path, step: int) -> Path:
    """Moves a checkpoint to `workdir/damaged`, and returns where it is."""
    (workdir / "damaged").mkdir(exist_ok=True)
    target = files.unused(workdir / "damaged" / str(step))
    return (workdir / "checkpoints" / str(step)).rename(target)


def mark_unsaved(workdir: Path) -> None:
    """Marks a run that has saved no checkpoint yet, and takes the mark away when it has.

    The mark tells it from a run whose checkpoints were removed.
    """
    mark = workdir / "checkpoints" / _UNSAVED
    with contextlib.suppress(OSError):  # a full disk is told at each save
        if saved_steps(workdir):
            mark.unlink(missing_ok=True)
        else:
            mark.touch()


def is_marked_unsaved(workdir: Path) -> bool:
    """Returns whether `mark_unsaved` has marked a run."""
    return (workdir / "checkpoints" / _UNSAVED).exists()


def saved_steps(workdir: Path | str) -> list[int]:
    """Returns the steps of which a run has checkpoints, whole or not, ascending."""
    directory = Path(workdir) / "checkpoints"
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdigit())


def describe_damage(workdir: Path | str, step: int, damage: str) -> str:
    """Returns what `find_damage` has found, for people."""
    return f"checkpoint {Path(workdir) / 'checkpoints' / str(step)} is damaged ({damage})"


def name_others(workdir: Path | str, step: int) -> str:
    """Returns what to use in place of a checkpoint that cannot be read."""
    others = [other for other in saved_steps(workdir) if other != step]
    whole = [other for other in others if not find_damage(workdir, other, read=False)]
    if not whole:
        return "There is no other: restore it from a copy"
    return f"Restore it from a copy, or use {' or '.join(map(str, whole))}"


def find_damage(
    workdir: Path | str, step: int, items: Sequence[str] = ITEMS, *, read: bool = True
) -> str:
    """Reads all files of a checkpoint and compares them with the digests that were saved.

    Args:
        workdir: of the run.
        step: of the checkpoint.
        items: which parts of it.
        read: compare what the files hold too, not their sizes alone.

    Returns:
        What is wrong with it, or an empty text. Of checkpoints of a version that wrote no digests,
        the arrays are not looked at.
    """
    folder = Path(workdir) / "checkpoints" / str(step)
    if _ends_readers(folder / _NOTES):
        return f"{_NOTES} was altered"
    if not (folder / "digests").exists() and _is_older(folder):
        return _find_malformed(folder, items)
    saved = digests.read_sealed(folder / "digests" / "digests")
    if saved is None:
        return "digests/digests is missing or was altered"
    return digests.find_damage(folder, of_items(saved["files"], items), read=read)


def _find_malformed(folder: Path, items: Sequence[str]) -> str:
    """Returns which JSON of a checkpoint holds something else than it should, or an empty text."""
    for file, key, kind in (_JSON[item] for item in items if item in _JSON):
        if (folder / file).exists():  # scores are of validated states alone
            try:
                whole = type(json.loads((folder / file).read_text("utf-8"))[key]) is kind
            except MALFORMED:
                whole = False
            if not whole:
                return f"{file} holds no {key}"
    return ""


def _ends_readers(notes: Path) -> bool:
    """Returns whether Orbax's notes would end the program.

    They do so where they are nested too deep, or hold a number of too many digits. Orbax minds no
    text that is no JSON.
    """
    try:
        json.loads(notes.read_text())
    except (OSError, json.JSONDecodeError, UnicodeDecodeError):
        return False
    except (ValueError, RecursionError):
        return True
    return False


def _is_older(checkpoint: Path) -> bool:
    """Returns whether a checkpoint without digests was saved without them, and not cut short."""
    try:
        notes = (checkpoint / _NOTES).read_text()
    except (OSError, UnicodeDecodeError):
        return False
    return '"digests"' not in notes and (checkpoint / "params").exists()


def of_items(found: dict[str, list[int]], items: Sequence[str]) -> dict[str, list[int]]:
    """Returns the digests of those files that belong to some parts of a checkpoint."""
    return {name: digest for name, digest in found.items() if name.split("/")[0] in items}
