"""Read batches ahead of time, in a thread."""

import contextlib
import queue
import threading
from collections.abc import Generator, Iterable
from typing import TypeVar

import jax

from gpt2 import signals
from gpt2.utils.platform import host_device

T = TypeVar("T")


def prefetch(batches: Iterable[T]) -> Generator[T, None, None]:
    """Yield the items of `batches`, while a thread reads up to two more items.

    In the thread, JAX computes on the CPU, so that only the caller uses accelerators. An error in
    the thread is raised in the caller, in place of the item. The caller waits while no item is
    ready. If a signal stops the run during this wait, `Stopped` is raised, because the item might
    never arrive.
    """
    # The queue holds one batch, and the thread another.
    ready = queue.Queue[T | BaseException | None](1)
    is_closed = threading.Event()
    host = host_device()

    def read() -> None:
        end = None
        try:
            with jax.default_device(host):
                for batch in batches:
                    ready.put(batch)
                    if is_closed.is_set():
                        return
        except BaseException as error:
            end = error
        ready.put(end)

    reader = threading.Thread(target=read, name="prefetch", daemon=True)
    reader.start()
    try:
        while (batch := signals.get_unless_stopped(ready)) is not None:
            if isinstance(batch, BaseException):
                raise batch
            yield batch
    finally:
        is_closed.set()
        with contextlib.suppress(queue.Empty):
            ready.get_nowait()  # makes room for a batch that the thread waits to put
        reader.join(timeout=1)
