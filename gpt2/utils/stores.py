"""Places by URL (gs://, s3://, hf://, https://, ...), by way of this machine's disk.

A folder at a URL has a working copy in the cache, and in it a record of what the store held at the
last exchange. `fetch` brings the copy up to date; a `Mirror` sends what a run writes. What marks
other files as whole comes last and goes first. Weights are fetched when somebody reads them.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec

from gpt2.errors import URLS, UserError, warn
from gpt2.utils import files

HUGGING_FACE = (
    r"[^/]+\.(json|safetensors)$"  # a model's files, without other frameworks'
)
RECORD = ".store.json"
_OWNER = ".owner"
_PATIENCE = 300.0  # seconds that the end of a run waits for its store
_PAUSE = 2.0  # seconds between looks at the working copy
_STEP = re.compile(r"(.*checkpoints/\d+)/")
_WEIGHTS = re.compile(r".*checkpoints/\d+/(params|rest|guard)/")
_MARK = re.compile(r"(.*/)?(digests/digests|prepared\.json)")
_HIDDEN = re.compile(r"damaged/|(.*/)?(\.|.*(\.tmp$|\.orbax-checkpoint-tmp))")


def is_url(place: object) -> bool:
    """Returns whether a place is a URL, not a path of this machine."""
    return "://" in str(place)


@dataclasses.dataclass(frozen=True)
class Remote:
    """A file at a URL, as it was when it was found."""

    url: str
    size: int
    version: int  # differs whenever the content may

    def __str__(self) -> str:
        return self.url


def find(pattern: str) -> list[Remote]:
    """Returns the files that a URL, maybe with wildcards, names: sorted."""
    found: dict[str, Any] = {}
    with _reaching(pattern) as (store, root), contextlib.suppress(FileNotFoundError):
        is_glob = re.search(r"[*?[]", root) and "http" not in store.protocol
        found = store.glob(root, detail=True) if is_glob else {root: store.info(root)}
        found = {store.unstrip_protocol(name): info for name, info in found.items()}
    are_files = (url for url in sorted(found) if found[url]["type"] == "file")
    return [
        Remote(url, found[url].get("size") or 0, _version(found[url]))
        for url in are_files
    ]


def at_hand(file: Path | Remote) -> Path:
    """Returns where on this machine a file lies: that of a store in the cache, by its own name."""
    if isinstance(file, Path):
        return file
    path = (
        _cache("files", f"{file.url} {file.version}")
        / Path(file.url.partition("?")[0]).name
    )
    if not path.exists():
        with _reaching(file.url) as (store, root):
            _get(store, root, path)
    return path


def copy_of(place: str | Path) -> Path:
    """Returns the folder on this machine that a path or a URL names: of a URL, the working copy."""
    return _cache("stores", str(place)) if is_url(place) else Path(place).expanduser()


def fetch(place: str | Path, only: str = "") -> Path:
    """Returns the folder on this machine that a path or a URL names, with what the store has now.

    What was not sent from here stays, unless the store has changed since. `only` selects names.
    """
    folder = copy_of(place)
    if not is_url(place):
        return folder
    URLS[str(folder)] = str(place)
    if files.is_locked(folder / ".lock"):  # a run is training there
        return folder
    with _exchange(str(place), folder) as (store, root, record):
        theirs = _versions(store, root)
        owner = folder / _OWNER
        is_ours = False
        with contextlib.suppress(
            FileNotFoundError
        ):  # whose last exchange may have been cut short
            is_ours = owner.read_bytes() == store.cat_file(f"{root}/{_OWNER}")
        if not is_ours and {name: record[name][2] for name in record} != theirs:
            found = _files(folder)
            if any(
                record.get(name, [0, 0])[:2] != found[name] for name in found
            ):  # never sent
                aside = folder.rename(
                    folder.with_name(f"{folder.name}-{time.time_ns()}")
                )
                warn(f"{place} has changed; what this machine had is in {aside}")
            shutil.rmtree(folder, ignore_errors=True)
        here = {name: record[name][:2] for name in record if (folder / name).exists()}
        record.clear()
        record.update(
            (name, [*here.get(name, [0, 0]), theirs[name]]) for name in theirs
        )
        wanted = {n for n in theirs if _mark(n) in theirs and not _WEIGHTS.match(n)}
        _fetch_missing(
            store, root, folder, record, {n for n in wanted if re.match(only, n)}
        )
    return folder


def url_of(folder: Path) -> str:
    """Returns the URL of a working copy, of another folder an empty text."""
    return _read_record(folder)[0]


def refresh(folder: Path) -> None:
    """Brings a working copy up to date; another folder stays as it is."""
    if url := url_of(folder):
        fetch(url)


def fetch_file(place: str | Path) -> Path:
    """Returns where a file lies on this machine that a path or a URL names, JSON beside it too."""
    folder, _, name = str(place).rpartition("/")
    return (
        fetch(folder, r"[^/]+\.json$") / name
        if is_url(place)
        else Path(place).expanduser()
    )


def complete(folder: Path, names: Iterable[str]) -> None:
    """Fetches those files of a working copy that it lacks; of another folder there are none."""
    url, record = _read_record(folder)
    if missing := {
        name for name in names if name in record and not (folder / name).exists()
    }:
        with _exchange(url, folder) as (store, root, record):
            _fetch_missing(store, root, folder, record, missing)


def push(place: str | Path, folder: Path) -> None:
    """Sends a URL what its working copy has gained or lost since the last exchange."""
    if not is_url(place):
        return
    record = _read_record(folder)[1]
    found = _files(folder)
    changed = {n for n in found if record.get(n, [0, 0])[:2] != found[n]}
    gone = {
        n for n in record if n not in found and (record[n][0] or _mark(n) not in found)
    }
    if not changed and not gone:
        return
    kept = folder.with_name(f".{folder.name}.sending")
    with _exchange(str(place), folder) as (store, root, record):
        shutil.rmtree(kept, ignore_errors=True)  # of a process that was killed
        for (
            name
        ) in changed:  # what the run removes meanwhile stays there until it is sent
            (kept / name).parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.link(folder / name, kept / name)
        missed = {_mark(name) for name in changed if not (kept / name).exists()}
        changed = {name for name in changed if _mark(name) not in missed}
        _in_order(lambda name: _put(store, kept / name, f"{root}/{name}"), changed)
        _in_order(lambda name: _remove(store, f"{root}/{name}"), gone, backwards=True)
        theirs = _versions(store, root)
        record.clear()
        record.update(
            (n, [*found.get(n, [0, 0]), theirs[n]])
            for n in theirs
            if n in found or _STEP.match(n)
        )
        shutil.rmtree(kept, ignore_errors=True)


@contextlib.contextmanager
def writing(place: str | Path) -> Iterator[Path]:
    """Yields the path at which to write a file or a new folder, which a URL then receives."""
    if not is_url(place):
        path = Path(place).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with (
        tempfile.TemporaryDirectory() as scratch,
        _reaching(str(place)) as (store, root),
    ):
        yield (path := Path(scratch) / Path(place).name)
        if path.is_file():
            _put(store, path, root)
        else:
            if _versions(store, root):
                raise UserError(f"{place} exists already", "Give another place")
            push(place, path)


class Mirror(contextlib.AbstractContextManager):
    """Sends what a run writes into its working copy, beside the training. A path needs no sending.

    A run that begins later elsewhere takes the URL over; this one then stops as by SIGTERM.
    """

    def __init__(self, place: str | Path, sends: bool = True):
        self.folder = fetch(place)
        self._is_lost = False
        self._place = place if sends else self.folder
        self._key = secrets.token_bytes(8)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="mirror", daemon=True)

    def __enter__(self) -> "Mirror":
        if is_url(self._place):
            with _reaching(str(self._place)) as (store, root):
                store.pipe_file(f"{root}/{_OWNER}", self._key)
            (self.folder / _OWNER).write_bytes(self._key)
            push(self._place, self.folder)
            self._thread.start()
        return self

    def _send(self) -> None:
        with _reaching(str(self._place)) as (store, root):
            self._is_lost = store.cat_file(f"{root}/{_OWNER}") != self._key
        if self._is_lost:
            raise UserError(f"another run has taken {self._place} over")
        push(self._place, self.folder)

    def _follow(self) -> None:
        sent = None
        is_told = False
        while not self._ends.wait(_PAUSE):
            marks = {name for name in _files(self.folder) if _MARK.fullmatch(name)}
            try:
                if marks != sent:
                    self._send()
                sent = marks
                is_told = False
            except UserError as error:
                if self._is_lost:
                    return os.kill(os.getpid(), signal.SIGTERM)
                if not is_told:
                    warn(f"{error.what}; the run goes on")
                is_told = True

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        if not is_url(self._place):
            return
        self._ends.set()
        self._thread.join()
        start = time.monotonic()
        while True:
            try:
                return self._send()
            except UserError as failure:
                if self._is_lost or time.monotonic() - start > _PATIENCE:
                    URLS.clear()
                    told = UserError(
                        failure.what, f"All of it is in {self.folder}", exit_code=5
                    )
                    if error is None:
                        raise told from None
                    return warn(str(told))
            time.sleep(_PAUSE)


def _cache(kind: str, url: str) -> Path:
    root = (
        Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gpt2-jax"
    )
    key = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:12]
    return root / kind / f"{Path(url).name.partition(' ')[0]}-{key}"


@contextlib.contextmanager
def _reaching(url: str) -> Iterator[tuple[Any, str]]:
    """Yields a URL's file system and its path there, and tells what fails there in one line."""
    try:
        store, root = fsspec.url_to_fs(url, use_listings_cache=False)
        yield store, root.rstrip("/")
    except UserError:
        raise
    except (
        Exception
    ) as error:  # of each driver's own kinds; a missing one names its package
        told = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(
            f"{url} cannot be reached ({told})", "Mend that, and repeat"
        ) from error


@contextlib.contextmanager
def _exchange(
    url: str, folder: Path
) -> Iterator[tuple[Any, str, dict[str, list[int]]]]:
    """Yields what `_reaching` yields, and a working copy's record, which it keeps in the end."""
    lock = folder.with_name(f".{folder.name}.exchange")
    with files.locked(lock), _reaching(url) as (store, root):
        record = _read_record(folder)[1]
        yield store, root, record
        files.write_json(folder / RECORD, {"url": url, "files": record})


def _read_record(folder: Path) -> tuple[str, dict[str, list[int]]]:
    """Returns the URL of a working copy, and of each file size and time here and version there."""
    path = folder / RECORD
    tree = json.loads(path.read_text()) if path.exists() else {}
    return tree.get("url", ""), tree.get("files", {})


def _version(info: dict[str, Any]) -> int:
    """Returns a number for what a store tells of a file; the URL that it redirects to may vary."""
    told = sorted((name, str(value)) for name, value in info.items() if name != "url")
    return zlib.crc32(str(told).encode())


def _versions(store: Any, root: str) -> dict[str, int]:
    store.invalidate_cache()
    found = {
        n.removeprefix(root).lstrip("/"): i
        for n, i in store.find(root, detail=True).items()
    }
    return {
        n: _version(found[n])
        for n in found
        if n and n[-1] != "/" and not _HIDDEN.match(n)
    }


def _files(folder: Path) -> dict[str, list[int]]:
    """Returns size and time of each file of a working copy, by name."""
    found = {}
    for root, _, names in os.walk(folder):
        for path in (Path(root, name) for name in names):
            with contextlib.suppress(FileNotFoundError):  # a run is at work
                about = path.stat()
                name = path.relative_to(folder).as_posix()
                found[name] = [about.st_size, about.st_mtime_ns]
    return {name: found[name] for name in found if not _HIDDEN.match(name)}


def _mark(name: str) -> str:
    """Returns the name of what marks a file as one of a whole checkpoint; else its own."""
    step = _STEP.match(name)
    return f"{step[1]}/digests/digests" if step else name


def _fetch_missing(
    store: Any, root: str, folder: Path, record: dict, names: set[str]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    missing = {name for name in names if not (folder / name).exists()}
    _in_order(lambda name: _get(store, f"{root}/{name}", folder / name), missing)
    found = _files(folder)
    record.update((name, [*found[name], record[name][2]]) for name in missing)


def _in_order(
    job: Callable[[str], None], names: set[str], backwards: bool = False
) -> None:
    """Does a job for each file, several at once; marks come last, or first."""
    marks = {name for name in names if _MARK.fullmatch(name)}
    with ThreadPoolExecutor(8) as pool:
        for group in (marks, names - marks) if backwards else (names - marks, marks):
            list(pool.map(job, sorted(group)))


def _get(store: Any, source: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    store.get_file(source, str(partial))
    partial.replace(path)


def _put(store: Any, path: Path, target: str) -> None:
    whole = path.stat().st_size < 1 << 26  # at once, since a run may be adding to it
    store.pipe_file(target, path.read_bytes()) if whole else store.put_file(
        str(path), target
    )


def _remove(store: Any, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        store.rm_file(name)
