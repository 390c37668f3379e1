"""Writes into a trace which line of Python the host's loop is at."""

import contextlib
import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from types import FrameType
from urllib.parse import quote

import jax

LINE = "host line"  # the name of its annotations
_INTERVAL = 0.002  # seconds from one look to the next
_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
)


@contextlib.contextmanager
def sampled() -> Iterator[None]:
    """Looks at the calling thread every 2 ms, and annotates the trace with its line.

    Python's own tracer would give each call, at a cost that changes what is measured.
    """
    ended = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(threading.get_ident(), ended), daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _watch(thread: int, ended: threading.Event) -> None:
    seen: dict[str, str] | None = None
    with contextlib.ExitStack() as annotation:
        while not ended.wait(_INTERVAL):
            frame = sys._current_frames().get(thread)
            now = _describe(frame) if frame else None
            if now != seen:
                annotation.close()
                seen = now
                if now:
                    annotation.enter_context(jax.profiler.TraceAnnotation(LINE, **now))


def _describe(frame: FrameType) -> dict[str, str]:
    """Returns the innermost line outside of libraries, and the function inside of it."""
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_filename.startswith((*_LIBRARIES, "<")):
        outer = outer.f_back
    if outer is None:
        return {"where": "Python", "inside": frame.f_code.co_name}
    file = outer.f_code.co_filename
    line = outer.f_lineno
    # Annotations give a meaning to commas, equals signs and brackets: quoted as in a URL.
    text = quote(linecache.getline(file, line).strip(), safe=" ._:/*+-")
    return {
        "where": f"{os.path.relpath(file)}:{line}",
        "text": text,
        "inside": frame.f_code.co_name,
    }
