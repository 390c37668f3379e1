"""Texts that are deleted or changed while a run needs them."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.faults.laboratory import (
    SHORT,
    Laboratory,
    Row,
    attempt,
    check_start,
    compare,
    newest_saved,
)


def texts(lab: Laboratory) -> Iterator[Row]:
    """Deletes or changes a text."""
    for what, change in (("deleted", Path.unlink), ("changed", lengthen)):
        make = partial(while_it_trains, lab, lab.directory / f"{what}-in-training", change)
        yield attempt(f"a text {what} while a run trains on it, which is then killed", 1, make)
        make = partial(while_it_prepares, lab, lab.directory / f"{what}-in-preparation", change)
        yield attempt(f"a text {what} while it is prepared", 1, make)


def lengthen(path: Path) -> None:
    """Adds a word."""
    path.write_text(path.read_text() + " more")


def while_it_trains(lab: Laboratory, workdir: Path, change: Callable[[Path], object]) -> float:
    """A run does not see the change; it is refused at the next start, until it is undone."""
    corpus = lab.write_corpus(f"{workdir.name}-corpus")
    text = corpus / "29.txt"
    whole = text.read_text()
    with lab.run(workdir, SHORT, corpus=corpus) as run:
        run.until_step(11)
        change(text)
        run.until_step(22)
    saved = newest_saved(workdir)
    with lab.run(workdir, SHORT, corpus=corpus) as again:
        again.wait_for_mistake()
    text.write_text(whole)
    with lab.run(workdir, SHORT, corpus=corpus) as last:
        last.until_phase("compile")
        change(text)
        last.wait(0)
    check_start(workdir, saved)
    compare(workdir, lab.unharmed(SHORT))
    return max(run.quiet, again.quiet, last.quiet)


def while_it_prepares(lab: Laboratory, workdir: Path, change: Callable[[Path], object]) -> float:
    """A run is refused until the change is undone."""
    corpus = lab.write_corpus(f"{workdir.name}-corpus")
    text, data_dir = corpus / "29.txt", workdir.with_name(f"{workdir.name}-data")
    whole = text.read_text()
    with lab.run(workdir, SHORT, corpus=corpus, data_dir=data_dir) as run:
        run.until_phase("preparation")
        run.stop()
        change(text)
        run.go_on()
        run.wait_for_mistake()
    text.write_text(whole)
    return max(run.quiet, lab.finish(workdir, SHORT, corpus=corpus, data_dir=data_dir))
