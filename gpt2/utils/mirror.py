"""Upload the folder of a run while the run trains."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from gpt2.errors import UserError, warn
from gpt2.utils.stores import TakenOver, claim, completion_markers, push

PAUSE = 2.0  # seconds between checks for new checkpoints


@contextlib.contextmanager
def mirrored(url: str, folder: Path) -> Iterator[None]:
    """While the body runs, upload `folder`, the folder of a run, to `url`.

    Files are uploaded after every checkpoint and at the end. If the upload at the end fails, raise
    a UserError, or only print a warning if the body has raised an error.

    If another run has begun at the same URL, this run notices it at its next upload, and then sends
    SIGTERM to itself, so that it stops.
    """
    claim(url, folder)
    ends = threading.Event()
    thread = threading.Thread(target=_follow, args=(url, folder, ends), daemon=True)
    thread.start()
    is_done = False
    try:
        yield
        is_done = True
    finally:
        ends.set()
        thread.join()
        try:
            push(url, folder)
        except UserError as error:
            remedy = f"All files are in {folder}"
            if isinstance(error, TakenOver):
                remedy += "; if you repeat the command, it stops the other run"
            lost = UserError(error.what, remedy, exit_code=5)
            if is_done:
                raise lost from None
            warn(str(lost))


def _follow(url: str, folder: Path, ends: threading.Event) -> None:
    sent: set[str] | None = None
    has_warned = False
    while not ends.wait(PAUSE):
        markers = completion_markers(folder)
        if markers == sent:
            continue
        try:
            push(url, folder)
            sent = markers
            has_warned = False
        except TakenOver:
            return os.kill(os.getpid(), signal.SIGTERM)
        except UserError as error:
            if not has_warned:
                warn(f"{error.what}; the run continues")
            has_warned = True
