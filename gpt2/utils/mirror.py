"""A run's folder at a URL: what it writes is sent beside the training."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from gpt2.errors import UserError, warn
from gpt2.utils.stores import TakenOver, claim, push, whole_parts

PAUSE = 2.0  # seconds between looks at the working copy


@contextlib.contextmanager
def mirrored(place: str, folder: Path) -> Iterator[None]:
    """Sends a URL what a run writes into its working copy, at every checkpoint and at the end.

    A run that begins later elsewhere takes the URL over; this one then stops as by SIGTERM.
    """
    claim(place, folder)
    ends = threading.Event()
    thread = threading.Thread(target=_follow, args=(place, folder, ends), daemon=True)
    thread.start()
    is_done = False
    try:
        yield
        is_done = True
    finally:
        ends.set()
        thread.join()
        try:
            push(place, folder)
        except UserError as error:
            lost = UserError(error.what, f"All of it is in {folder}", exit_code=5)
            if is_done:
                raise lost from None
            warn(str(lost))


def _follow(place: str, folder: Path, ends: threading.Event) -> None:
    sent: set[str] | None = None
    is_told = False
    while not ends.wait(PAUSE):
        parts = whole_parts(folder)
        if parts == sent:
            continue
        try:
            push(place, folder)
            sent = parts
            is_told = False
        except TakenOver:
            return os.kill(os.getpid(), signal.SIGTERM)
        except UserError as error:
            if not is_told:
                warn(f"{error.what}; the run goes on")
            is_told = True
