"""Disks that are full or read-only."""

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults.laboratory import (
    SHORT,
    Broken,
    Laboratory,
    Row,
    Watched,
    attempt,
    newest_saved,
)

SMALL_DISK = ("-t", "tmpfs", "-o", "size=32m", "tmpfs")


def full_disks(lab: Laboratory) -> Iterator[Row]:
    """Fills the disk of a run, or of its prepared text."""
    yield row(lab, "a full disk: during a save", full_during_save, 3)
    yield row(lab, "a full disk: of the screen too", full_with_its_screen, 1)
    yield row(lab, "a full disk: during preparation", full_during_preparation, 2)
    yield row(lab, "a full disk: from the start", full_from_the_start, 1)


def read_only_disks(lab: Laboratory) -> Iterator[Row]:
    """Makes a run's folder read-only."""
    yield row(lab, "a read-only workdir: when a run continues", read_only_at_start, 1)
    yield row(lab, "a read-only workdir: while a run trains", read_only_meanwhile, 1)


def row(lab: Laboratory, what: str, make: Callable[[Laboratory, int], float], times: int) -> Row:
    """Makes a fault so many times, if disks may be mounted."""
    if not can_mount(lab):
        return Row(what, tried=False)
    times = min(times, lab.most)
    return attempt(what, times, lambda: max(make(lab, index) for index in range(times)))


@contextlib.contextmanager
def mounted(path: Path, *options: str) -> Iterator[Callable[..., None]]:
    """Mounts a disk at a folder, which is created, and yields what mounts it with other options."""
    path.mkdir(exist_ok=True)

    def mount(*options: str) -> None:
        subprocess.run(["mount", *options, path], check=True, capture_output=True)

    mount(*options)
    try:
        yield mount
    finally:
        subprocess.run(["umount", path], check=True)


def can_mount(lab: Laboratory) -> bool:
    """Returns whether this process may mount disks."""
    try:
        with mounted(lab.directory / "probe", *SMALL_DISK):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@contextlib.contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Leaves a disk no room while inside."""
    path = disk / "filling"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    yield
    path.unlink()


def full_during_save(lab: Laboratory, index: int) -> float:
    """The second save finds no room, a little later each time."""
    disk = lab.directory / f"disk-{index}"
    with mounted(disk, *SMALL_DISK):
        with lab.run(disk / disk.name, SHORT) as run:
            run.until_phase("save", saved=10)
            run.pause(0.02 * index)
            run.stop()
            saved = newest_saved(run.workdir)
            with filled(disk):
                run.go_on()
                run.wait(5)
        check_saves_failed(run)
        return max(run.quiet, lab.finish(run.workdir, SHORT, saved))


def full_with_its_screen(lab: Laboratory, index: int) -> float:
    """What would be told finds no room either."""
    disk = lab.directory / "screen-disk"
    with mounted(disk, *SMALL_DISK):
        with lab.run(disk / disk.name, SHORT, screens=disk) as run:
            run.until_phase("save", saved=10)
            run.stop()
            saved = newest_saved(run.workdir)
            with filled(disk):
                run.go_on()
                run.wait(5)
        return max(run.quiet, lab.finish(run.workdir, SHORT, saved))


def full_during_preparation(lab: Laboratory, index: int) -> float:
    """The prepared text finds no room, a little later each time."""
    disk, workdir = lab.directory / f"data-disk-{index}", lab.directory / f"unprepared-{index}"
    with mounted(disk, *SMALL_DISK):
        with lab.run(workdir, SHORT, data_dir=disk) as run:
            run.until_phase("preparation")
            run.pause(0.1 * index)
            run.stop()
            with filled(disk):
                run.go_on()
                run.wait_for_mistake()
        return max(run.quiet, lab.finish(workdir, SHORT, data_dir=disk))


def full_from_the_start(lab: Laboratory, index: int) -> float:
    """There is no room for the first file."""
    disk = lab.directory / "full-disk"
    with mounted(disk, *SMALL_DISK):
        with filled(disk), lab.run(disk / disk.name, SHORT) as run:
            run.wait_for_mistake()
        return max(run.quiet, lab.finish(disk / disk.name, SHORT))


def read_only_at_start(lab: Laboratory, index: int) -> float:
    """A run is killed, and its disk comes back read-only."""
    disk = lab.directory / "read-only"
    with mounted(disk, *SMALL_DISK) as mount:
        with lab.run(disk / disk.name, SHORT) as run:
            run.until_step(21)
        saved = newest_saved(run.workdir)
        mount("-o", "remount,ro")
        with lab.run(run.workdir, SHORT) as again:
            again.wait_for_mistake()
        mount("-o", "remount,rw")
        return max(run.quiet, again.quiet, lab.finish(run.workdir, SHORT, saved))


def read_only_meanwhile(lab: Laboratory, index: int) -> float:
    """What opens a file in the folder from now on finds it read-only."""
    workdir = lab.directory / "bound"
    with lab.run(workdir, SHORT) as run:
        run.until_step(11)
        run.stop()
        saved = newest_saved(workdir)
        with mounted(workdir, "--bind", str(workdir)) as mount:
            mount("-o", "remount,ro,bind")
            run.go_on()
            run.wait(5)
    check_saves_failed(run)
    return max(run.quiet, lab.finish(workdir, SHORT, saved))


def check_saves_failed(run: Watched) -> None:
    """Raises Broken unless a run has told of each save that failed, and of the last at its end."""
    *warnings, last = run.stderr().splitlines() or [""]
    told = [line for line in warnings if re.match(r"warning: the state of step \d+ is not", line)]
    if not told or not re.match(rf"error: the state of step {SHORT} is not saved", last):
        raise Broken(f"it does not tell of its saves: {run.stderr()!r}")
