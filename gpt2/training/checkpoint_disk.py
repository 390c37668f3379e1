"""The disk under a checkpoint: what it lacks for a save, found before Orbax begins one."""

import errno
import os
import shutil
from pathlib import Path

import jax

from gpt2.parallel import distributed
from gpt2.utils.text import format_bytes

_NOTES_BYTES = 1 << 18  # Orbax's, beside the arrays
_FULL_BYTES = 1 << 20  # with less, a save that failed has failed for want of room


class UnfitDiskError(Exception):
    """What a disk lacks for a save, for people. All processes raise it together."""


def check_disk(directory: Path, num_bytes: int) -> None:
    """Checks that checkpoints can be written.

    Args:
        directory: of a run's checkpoints.
        num_bytes: of the state to save.

    Raises:
        UnfitDiskError: the disk has no room, or is read-only.
    """
    needed = num_bytes + _NOTES_BYTES
    free = shutil.disk_usage(directory.parent).free
    if not distributed.from_first(free >= needed):
        about = f"{format_bytes(needed)} are needed, and {format_bytes(free)} are free"
        raise UnfitDiskError(about)
    # Where Orbax cannot create a folder, its threads wait for it for twenty minutes, and the
    # process cannot end before. The name is not one that its thread takes for a save's remains.
    folder, number = directory / ".writable", 0
    if jax.process_index() == 0:
        try:
            folder.mkdir(exist_ok=True)
            folder.rmdir()
        except OSError as error:
            number = error.errno or errno.EIO
    if number := distributed.from_first(number):
        raise UnfitDiskError(os.strerror(number))


def describe_failure(error: Exception, directory: Path) -> str:
    """Returns why a save into `directory` failed, in a line."""
    full = shutil.disk_usage(directory.parent).free < _FULL_BYTES
    return "no room is left on the disk" if full else str(error).strip().split("\n")[0]
