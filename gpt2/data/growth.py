"""A corpus whose first part is read while the rest is prepared."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from gpt2.data.tokens import TokenStream
from gpt2.errors import UserError

if TYPE_CHECKING:
    from gpt2.data.dataset import Dataset


class Growth:
    """A thread that prepares the `whole`, of which `find` returns the part that is on disk."""

    def __init__(
        self, prepare: "Callable[[], Dataset]", find: "Callable[..., Dataset | None]"
    ):
        self._find = find
        self.whole = Future["Dataset"]()

        def run() -> None:
            try:
                self.whole.set_result(prepare())
            except BaseException as error:
                self.whole.set_exception(error)

        threading.Thread(target=run, daemon=True).start()

    def wait(self, split: str, num_tokens: float) -> "Dataset":
        """Returns a part with so many tokens of a split, else the corpus; raises as `prepare`."""
        while not self.whole.done():
            with contextlib.suppress(OSError, UserError):  # it has just been renamed
                if part := self._find(split, num_tokens):
                    return dataclasses.replace(part, growth=self)
            time.sleep(0.2)
        return self.whole.result()


class GrowingStream(TokenStream):
    """A split's stream, as far as it is prepared."""

    def __init__(self, growth: Growth, split: str):
        super().__init__([], "uint16")
        self._growth = growth
        self._split = split
        self._grows = True
        self.wait(1)

    def wait(self, num_tokens: float) -> int:
        """Waits as `TokenStream` says."""
        while self._grows and len(self) < num_tokens:
            part = self._growth.wait(self._split, num_tokens)
            renamed = [UserError] if part.growth else []
            with contextlib.suppress(*renamed):
                super().__init__(part.shards[self._split], part.dtype, part.directory)
                self._grows = part.growth is not None
        return len(self)
