"""Writes into a trace which line of Python the host's loop is at."""

import contextlib
import functools
import linecache
import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType
from urllib.parse import quote

import jax

LINE = "host line"  # the name of its annotations
_INTERVAL = 0.002  # seconds from one look to the next
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


class Sampler:
    """Looks at the thread that enters it every 2 ms; a context manager, used within a trace.

    Python's own tracer would give each call, at a cost that changes what is measured. A line
    stands in the trace as an annotation of another thread, for as long as it is seen.
    """

    def __init__(self) -> None:
        self._watched = threading.get_ident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sampler", daemon=True)

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        seen: tuple[str, str, str] | None = None
        with contextlib.ExitStack() as annotation:
            while not self._ended.wait(_INTERVAL):
                frame = sys._current_frames().get(self._watched)
                now = _describe(frame) if frame else None
                if now != seen:
                    annotation.close()
                    seen = now
                    if now:
                        where, text, inside = now
                        annotation.enter_context(
                            jax.profiler.TraceAnnotation(
                                LINE, where=where, text=text, inside=inside
                            )
                        )


def _describe(frame: FrameType) -> tuple[str, str, str]:
    """Returns the innermost line outside of libraries: place, source, and the function inside.

    The source is quoted as in a URL.
    """
    inside = frame.f_code.co_name
    outer: FrameType | None = frame
    while outer is not None and _is_library(outer.f_code.co_filename):
        outer = outer.f_back
    if outer is None:
        return "Python", "", inside
    file, line = outer.f_code.co_filename, outer.f_lineno
    # Annotations give a meaning to commas, equals signs and brackets.
    text = quote(linecache.getline(file, line).strip(), safe=" ._:/*+-")
    return f"{short_path(file)}:{line}", text, inside


@functools.cache
def _is_library(file: str) -> bool:
    return file.startswith((*_LIBRARIES, "<"))


@functools.cache
def short_path(file: str) -> str:
    """Returns a path as seen from the current directory, or else its last two levels."""
    path = Path(file)
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return "/".join(path.parts[-2:])
