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
import jax

from gpt2.errors import UserError, refuse, warn
from gpt2.utils import files

HUGGING_FACE = r"[^/]+\.(json|txt|safetensors|bin)$"  # a model's files, without other frameworks'
RECORD, _OWNER = ".store.json", ".owner"
_PATIENCE = 300.0  # seconds that the end of a run waits for its store
_PAUSE = 2.0  # seconds between looks at the working copy
_READ_WHOLE = 1 << 26  # bytes of a file, to which a run may be adding
_STEP = re.compile(r"(.*checkpoints/\d+)/")
_WEIGHTS = re.compile(r".*checkpoints/\d+/(params|rest|guard)/")
_MARK = re.compile(r"(.*/)?(digests/digests|prepared\.json)")

Record = dict[str, list[int]]  # name -> size and time here, 0 if it is not; version in the store


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


def at_hand(file: Path | Remote) -> Path:
    """Returns where on this machine a file lies: that of a store in the cache, by its own name."""
    if isinstance(file, Path):
        return file
    key = hashlib.sha256(f"{file.url} {file.version}".encode()).hexdigest()[:16]
    path = _cache() / "files" / key / Path(file.url.partition("?")[0]).name
    if not path.exists():
        with _reaching(file.url) as (store, root):
            _get(store, root, path)
    return path


def find(pattern: str) -> list[Remote]:
    """Returns the files that a URL, maybe with wildcards, names: sorted."""
    found: dict[str, Any] = {}
    with _reaching(pattern) as (store, root), contextlib.suppress(FileNotFoundError):
        is_glob = re.search(r"[*?[]", root) and "http" not in store.protocol
        found = store.glob(root, detail=True) if is_glob else {root: store.info(root)}
        found = {store.unstrip_protocol(name): info for name, info in found.items()}
    are_files = (url for url in sorted(found) if found[url]["type"] == "file")
    return [Remote(url, found[url].get("size") or 0, _version(found[url])) for url in are_files]


def copy_of(place: str | Path) -> Path:
    """Returns the folder on this machine that a path or a URL names: of a URL, the working copy."""
    if not is_url(place):
        return Path(place).expanduser()
    url = str(place).rstrip("/")
    return _cache() / "stores" / f"{Path(url).name}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"


def fetch(place: str | Path, only: str = "") -> Path:
    """Returns the folder on this machine that a path or a URL names, with what the store has now.

    What was not sent from here stays, unless the store has changed since. `only` is a pattern of
    the names that are wanted.
    """
    folder = copy_of(place)
    if not is_url(place) or files.is_locked(folder / ".lock"):  # a run is training in the copy
        return folder
    with _exchanging(str(place), folder) as (store, root):
        record, theirs = _read_record(folder), _versions(store, root)
        differing = {n for n in theirs if record.get(n, [0, 0, None])[2] != theirs[n]}
        whole = {name for name in theirs if _mark(name) in theirs}
        if differing or record.keys() - theirs.keys():
            for name in _files(folder):
                if name in differing or name not in whole:
                    (folder / name).unlink()
            for step in folder.rglob("checkpoints/*"):
                if not any(path.is_file() for path in step.rglob("*")):
                    shutil.rmtree(step)
        record = {n: [0, 0, theirs[n]] if n in differing else record[n] for n in theirs}
        wanted = {n for n in whole if re.match(only, n) and not _WEIGHTS.match(n)}
        _fetch_missing(store, root, folder, record, wanted)
    return folder


def fetch_file(place: str | Path) -> Path:
    """Returns where a file lies on this machine that a path or a URL names, JSON beside it too."""
    folder, _, name = str(place).rpartition("/")
    return fetch(folder, r"[^/]+\.json$") / name if is_url(place) else Path(place).expanduser()


def complete(folder: Path, names: Iterable[str]) -> None:
    """Fetches those files of a working copy that it lacks; of another folder there are none."""
    record = _read_record(folder)
    if missing := {name for name in names if name in record and not (folder / name).exists()}:
        url = json.loads((folder / RECORD).read_text())["url"]
        with _exchanging(url, folder) as (store, root):
            _fetch_missing(store, root, folder, record, missing)


def push(place: str | Path, folder: Path) -> None:
    """Sends a URL what its working copy has gained or lost since the last exchange."""
    record, found = _read_record(folder), _files(folder) if is_url(place) else {}
    changed = {n for n in found if record.get(n, [0, 0])[:2] != found[n]}
    lost = record.keys() - found.keys()
    gone = {n for n in lost if any(record[n][:2]) or _mark(n) not in found}
    if not changed and not gone:
        return
    with _exchanging(str(place), folder) as (store, root), _scratch_beside(folder) as scratch:
        for name in changed:  # what the run removes meanwhile stays here until it is sent
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.link(folder / name, scratch / name)
        missed = {_mark(name) for name in changed if not (scratch / name).exists()}
        changed = {name for name in changed if _mark(name) not in missed}
        _in_order(lambda name: _put(store, scratch / name, f"{root}/{name}"), changed)
        _in_order(lambda name: _remove(store, f"{root}/{name}"), gone, backwards=True)
        theirs = _versions(store, root)
        known = {name for name in theirs if name in found or _STEP.match(name)}
        record = {n: [*found.get(n, [0, 0]), theirs[n]] for n in known}
        _write_record(folder, str(place), record)


@contextlib.contextmanager
def writing(place: str | Path) -> Iterator[Path]:
    """Yields the path at which to write a file or a new folder, which a URL then receives."""
    if not is_url(place):
        path = Path(place).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with tempfile.TemporaryDirectory() as scratch, _reaching(str(place)) as (store, root):
        path = Path(scratch) / Path(place).name
        yield path
        if path.is_dir():
            refuse(_versions(store, root), f"{place} exists already", "Give another place")
            push(place, path)
        else:
            _put(store, path, root)


class Mirror(contextlib.AbstractContextManager):
    """Sends what a run writes into its working copy, beside the training. A path needs no sending.

    A run that begins later elsewhere takes the URL over; this one then stops as by SIGTERM.
    """

    def __init__(self, place: str | Path):
        several = is_url(place) and jax.distributed.is_initialized() and jax.process_count() > 1
        how = "Mount the bucket, and give its folder"
        refuse(several, "several processes need a folder that they share", how)
        self._place, self.folder, self._is_lost = place, fetch(place), False
        self._key, self._ends = secrets.token_bytes(8), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="mirror", daemon=True)

    def __enter__(self) -> "Mirror":
        if is_url(self._place):
            with _reaching(str(self._place)) as (store, root):
                store.pipe_file(f"{root}/{_OWNER}", self._key)
            push(self._place, self.folder)
            self._thread.start()
        return self

    def _send(self) -> None:
        with _reaching(str(self._place)) as (store, root):
            self._is_lost = store.cat_file(f"{root}/{_OWNER}") != self._key
        refuse(self._is_lost, f"another run has taken {self._place} over")
        push(self._place, self.folder)

    def _follow(self) -> None:
        sent, is_told = None, False
        while not self._ends.wait(_PAUSE):
            marks = {name for name in _files(self.folder) if _MARK.fullmatch(name)}
            if marks == sent:
                continue
            try:
                self._send()
                sent, is_told = marks, False
            except UserError as error:
                if self._is_lost:
                    return os.kill(os.getpid(), signal.SIGTERM)
                if not is_told:
                    warn(f"{error.what}; the run goes on")
                is_told = True

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
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
                    told = UserError(failure.what, f"All of it is in {self.folder}", exit_code=5)
                    if error is None:
                        raise told from None
                    return warn(str(told))
            time.sleep(_PAUSE)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gpt2-jax"


@contextlib.contextmanager
def _reaching(url: str) -> Iterator[tuple[Any, str]]:
    """Yields a URL's file system and its path there, and tells what fails there in one line."""
    try:
        store, root = fsspec.url_to_fs(url, use_listings_cache=False)
        yield store, root.rstrip("/")
    except UserError:
        raise
    except Exception as error:  # of each driver's own kinds; a missing one names its package
        told = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(f"{url} cannot be reached ({told})", "Mend that, and repeat") from error


@contextlib.contextmanager
def _exchanging(url: str, folder: Path) -> Iterator[tuple[Any, str]]:
    with files.locked(folder.with_name(f".{folder.name}.exchange")), _reaching(url) as reached:
        yield reached


@contextlib.contextmanager
def _scratch_beside(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=".sending-", dir=folder.parent) as scratch:
        yield Path(scratch)


def _version(info: dict[str, Any]) -> int:
    """Returns a number for what a store tells of a file; the URL that it redirects to may vary."""
    told = sorted((name, str(value)) for name, value in info.items() if name != "url")
    return zlib.crc32(str(told).encode())


def _is_hidden(name: str) -> bool:
    """Returns whether a file is not exchanged: locks, records, and what is not complete yet."""
    return name.endswith(".tmp") or bool(re.search(r"(^|/)\.|\.orbax-checkpoint-tmp", name))


def _versions(store: Any, root: str) -> dict[str, int]:
    store.invalidate_cache()
    found = {n.removeprefix(root).lstrip("/"): i for n, i in store.find(root, detail=True).items()}
    return {n: _version(found[n]) for n in found if n and n[-1] != "/" and not _is_hidden(n)}


def _files(folder: Path) -> Record:
    """Returns size and time of each file of a working copy, by name."""
    found: Record = {}
    for root, _, names in os.walk(folder):
        for path in (Path(root, name) for name in names):
            name = path.relative_to(folder).as_posix()
            with contextlib.suppress(FileNotFoundError):  # a run is at work
                if not _is_hidden(name):
                    found[name] = [path.stat().st_size, path.stat().st_mtime_ns]
    return found


def _mark(name: str) -> str:
    """Returns the name of what marks a file as one of a whole checkpoint; else its own."""
    step = _STEP.match(name)
    return f"{step[1]}/digests/digests" if step else name


def _read_record(folder: Path) -> Record:
    path = folder / RECORD
    return json.loads(path.read_text())["files"] if path.exists() else {}


def _write_record(folder: Path, url: str, record: Record) -> None:
    files.write_json(folder / RECORD, {"url": url, "files": record})


def _fetch_missing(store: Any, root: str, folder: Path, record: Record, names: set[str]) -> None:
    def fetch(name: str) -> None:
        path = folder / name
        _get(store, f"{root}/{name}", path)
        record[name][:2] = path.stat().st_size, path.stat().st_mtime_ns

    folder.mkdir(parents=True, exist_ok=True)
    _in_order(fetch, {name for name in names if not (folder / name).exists()})
    _write_record(folder, store.unstrip_protocol(root), record)


def _in_order(job: Callable[[str], None], names: set[str], backwards: bool = False) -> None:
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
    if path.stat().st_size > _READ_WHOLE:
        store.put_file(str(path), target)
    else:
        store.pipe_file(target, path.read_bytes())


def _remove(store: Any, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        store.rm_file(name)
