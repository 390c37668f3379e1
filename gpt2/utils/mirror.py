"""A run's folder at a URL: what it writes is sent beside the training."""

import contextlib
import os
import signal
import threading
from pathlib import Path

from gpt2.errors import UserError, warn
from gpt2.utils.stores import TakenOver, claim, fetch, is_url, push, whole_parts

PAUSE = 2.0  # seconds between looks at the working copy


class Mirror(contextlib.AbstractContextManager):
    """Sends what a run writes into its working copy, at every checkpoint and at the end.

    A path needs no sending. A run that begins later elsewhere takes the URL over; this one then
    stops as by SIGTERM.
    """

    def __init__(self, place: str | Path, sends: bool = True):
        self.folder = fetch(place)
        self._place = str(place)
        self._sends = sends and is_url(place)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> "Mirror":
        if self._sends:
            claim(self._place, self.folder)
            self._thread.start()
        return self

    def _follow(self) -> None:
        sent: set[str] | None = None
        is_told = False
        while not self._ends.wait(PAUSE):
            parts = whole_parts(self.folder)
            if parts == sent:
                continue
            try:
                push(self._place, self.folder)
                sent = parts
                is_told = False
            except TakenOver:
                return os.kill(os.getpid(), signal.SIGTERM)
            except UserError as error:
                if not is_told:
                    warn(f"{error.what}; the run goes on")
                is_told = True

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if not self._sends:
            return
        self._ends.set()
        self._thread.join()
        try:
            push(self._place, self.folder)
        except UserError as failure:
            how = f"All of it is in {self.folder}"
            told = UserError(failure.what, how, exit_code=5)
            if error is None:
                raise told from None
            warn(str(told))
