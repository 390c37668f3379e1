"""Places by URL (gs://, s3://, hf://, https://, ...), by way of this machine's disk.

A folder at a URL has a working copy in the cache, and in it a record of what the store held at the
last exchange. `fetch` brings the copy up to date, `push` sends what it has gained, and a `Mirror`
pushes while a run writes. What marks other files as whole comes last and goes first. Weights are
fetched when somebody reads them.

Nothing is removed on one side because it is missing on the other: a checkpoint goes only where a
newer one has taken its place.
"""

import contextlib
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.dirfs import DirFileSystem

from gpt2.errors import UserError, warn
from gpt2.utils import files

# A model's files, without other frameworks'.
HUGGING_FACE = r"[^/]+\.(json|safetensors)$"
RECORD = ".store.json"
_OWNER = ".owner"  # a key of the run that began last
_SAMPLES = "samples.txt"
_PATIENCE = 300.0  # seconds that the end of a run waits for its store
_PAUSE = 2.0  # seconds between looks at the working copy
_STEP = re.compile(r"(.*checkpoints/(\d+))/")
_WEIGHTS = re.compile(r".*checkpoints/\d+/(params|rest|guard)/")
_MARK = re.compile(r"(.*/)?(digests/digests|prepared\.json)")
_HIDDEN = re.compile(r"damaged/|(.*/)?(\.|.*(\.tmp$|\.orbax-checkpoint-tmp))")


def is_url(place: object) -> bool:
    """Returns whether a place is a URL, not a path of this machine."""
    return "://" in str(place)


# Single files


class Remote(NamedTuple):
    """A file at a URL, as it was when it was found."""

    url: str
    size: int
    version: int  # differs whenever the content may

    def __str__(self) -> str:
        return self.url


def find(pattern: str) -> list[Remote]:
    """Returns the files that a URL, maybe with wildcards, names: sorted."""
    found = list[Remote]()
    with _reaching(pattern) as (store, root):
        is_web = "http" in store.protocol
        try:
            if re.search(r"[*?[]", root) and not is_web:
                infos = store.glob(root, detail=True)
            else:
                infos = {root: store.info(root)}
        except FileNotFoundError as error:
            # The web's file system calls every failure so.
            if is_web and error.__cause__ and "404" not in str(error.__cause__):
                raise error.__cause__ from None
            return []
        for name, info in infos.items():
            if info["type"] == "file":
                url = store.unstrip_protocol(name)
                found.append(Remote(url, info.get("size") or 0, _version(info)))
    return sorted(found)


def at_hand(file: Path | Remote) -> Path:
    """Returns where on this machine a file lies: that of a store in the cache, by its own name."""
    if isinstance(file, Path):
        return file
    name = Path(file.url.partition("?")[0]).name
    path = _cache("files", f"{file.url} {file.version}") / name
    if not path.exists():
        with _reaching(file.url) as (store, root):
            _get(store, root, path, file.size)
    return path


def fetch_file(place: str | Path) -> Path:
    """Returns where a file lies on this machine that a path or a URL names, JSON beside it too."""
    if not is_url(place):
        return Path(place).expanduser()
    folder, _, name = str(place).rpartition("/")
    return fetch(folder, r"[^/]+\.json$") / name


@contextlib.contextmanager
def writing(place: str | Path) -> Iterator[Path]:
    """Yields the path at which to write a file or a new folder, which a URL then receives."""
    if not is_url(place):
        path = Path(place).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / Path(place).name
        yield path
        with _reaching(str(place)) as (store, root):
            if path.is_file():
                _put(store, path, root)
            elif store.exists(root):
                raise UserError(f"{place} exists already", "Give another place")
            else:
                push(place, path)


# Folders


class _Known(NamedTuple):
    """A file of a store at the last exchange."""

    version: int  # there
    time: int = 0  # of the same file in the working copy, ns; 0: it was not there


_NEW = _Known(0)
_Record = dict[str, _Known]


def copy_of(place: str | Path) -> Path:
    """Returns the folder on this machine that a path or a URL names: of a URL, the working copy."""
    return _cache("stores", str(place)) if is_url(place) else Path(place).expanduser()


def place_of(folder: Path) -> str:
    """Returns the URL of a working copy, of another folder its path."""
    return _read_record(folder)[0] or str(folder)


def fetch(place: str | Path, only: str = "") -> Path:
    """Returns the folder on this machine that a path or a URL names, with what the store has now.

    What was not sent from here stays, unless another run has written there since: then it is set
    aside. A store that has lost checkpoints is refused. `only` is a pattern of names.
    """
    folder = copy_of(place)
    is_training = files.is_locked(folder / ".lock")
    if not is_url(place) or is_training:
        return folder
    with _exchange(str(place), folder) as (store, record):
        theirs = _list_store(store)
        has_changed = theirs != {name: file.version for name, file in record.items()}
        if has_changed and not _is_ours(store, folder):
            _make_way(str(place), folder, record, theirs)
        before = record.copy()
        record.clear()
        for name, version in theirs.items():
            record[name] = _Known(version, before.get(name, _NEW).time)
        is_wanted = lambda name: re.match(only, name) and not _WEIGHTS.match(name)  # noqa: E731
        whole = (name for name in theirs if _mark(name) in theirs)
        _fetch_missing(store, folder, record, filter(is_wanted, whole))
    return folder


def _is_ours(store: AbstractFileSystem, folder: Path) -> bool:
    """Returns whether the run that has begun last in a store is that of this working copy.

    Its last exchange may have been cut short, and nobody else has written there.
    """
    with contextlib.suppress(FileNotFoundError):
        return (folder / _OWNER).read_bytes() == store.cat_file(_OWNER)
    return False


def _make_way(
    place: str, folder: Path, record: _Record, theirs: Mapping[str, int]
) -> None:
    """Removes from a working copy what another run has replaced in the store."""
    step = _newest_step(record)
    newest = _newest_step(theirs)
    if step > newest:
        what = f"{place} has lost checkpoint {step}; {folder} is this machine's copy"
        raise UserError(what, f"Copy that to {place}, or move it elsewhere")
    outdated = list[Path]()
    for name, mtime in _list_copy(folder).items():
        known = record.get(name, _NEW)
        is_superseded = 0 <= _step(name) < newest
        if known.time != mtime or not (name in theirs or is_superseded):
            aside = folder.rename(folder.with_name(f"{folder.name}-{time.time_ns()}"))
            return warn(f"{place} has changed; what this machine had is in {aside}")
        if theirs.get(name) != known.version:
            outdated.append(folder / name)
    for path in outdated:
        path.unlink()


def complete(folder: Path, names: Iterable[str]) -> None:
    """Fetches those files of a working copy that it lacks; of another folder there are none."""
    url, record = _read_record(folder)
    missing = {name for name in names if not (folder / name).exists()}
    if missing & record.keys():
        with _exchange(url, folder) as (store, record):
            _fetch_missing(store, folder, record, missing & record.keys())


def push(place: str | Path, folder: Path) -> None:
    """Sends a URL what its working copy has gained since the last exchange.

    A checkpoint goes there as it goes here, since a newer one has taken its place.
    """
    if not is_url(place):
        return
    record = _read_record(folder)[1]
    here = _list_copy(folder)
    newest = _newest_step(here)
    changed = {name for name in here if record.get(name, _NEW).time != here[name]}
    gone = set[str]()
    for name in record.keys() - here.keys():
        is_superseded = 0 <= _step(name) < newest and _mark(name) not in here
        # A run that goes on removes its samples, which would say that it has ended.
        if is_superseded or name == _SAMPLES:
            gone.add(name)
    if not changed and not gone:
        return
    kept = folder.with_name(f".{folder.name}.sending")
    with _exchange(str(place), folder) as (store, record):
        # What the run removes meanwhile stays there until it is sent.
        shutil.rmtree(kept, ignore_errors=True)  # of a process that was killed
        for name in changed:
            (kept / name).parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.link(folder / name, kept / name)
        missed = {_mark(name) for name in changed if not (kept / name).exists()}
        changed = {name for name in changed if _mark(name) not in missed}
        _in_order(changed, lambda name: _put(store, kept / name, name))
        _in_order(gone, lambda name: _remove(store, name), marks_first=True)
        record.clear()
        for name, version in _list_store(store).items():
            record[name] = _Known(version, here.get(name, 0))
        shutil.rmtree(kept, ignore_errors=True)


class Mirror(contextlib.AbstractContextManager):
    """Sends what a run writes into its working copy, beside the training. A path needs no sending.

    A run that begins later elsewhere takes the URL over; this one then stops as by SIGTERM.
    """

    def __init__(self, place: str | Path, sends: bool = True):
        self.folder = fetch(place)
        self._place = str(place)
        self._sends = sends and is_url(place)
        self._is_lost = False
        self._key = secrets.token_bytes(8)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="mirror", daemon=True)

    def __enter__(self) -> "Mirror":
        if self._sends:
            with _reaching(self._place) as (store, root):
                store.pipe_file(f"{root}/{_OWNER}", self._key)
            (self.folder / _OWNER).write_bytes(self._key)
            push(self._place, self.folder)
            self._thread.start()
        return self

    def _send(self) -> None:
        with _reaching(self._place) as (store, root):
            self._is_lost = store.cat_file(f"{root}/{_OWNER}") != self._key
        if self._is_lost:
            raise UserError(f"another run has taken {self._place} over")
        push(self._place, self.folder)

    def _follow(self) -> None:
        sent: set[str] | None = None
        is_told = False
        while not self._ends.wait(_PAUSE):
            marks = _marks(_list_copy(self.folder))
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

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if not self._sends:
            return
        self._ends.set()
        self._thread.join()
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                return self._send()
            except UserError as failure:
                if self._is_lost or time.monotonic() > deadline:
                    how = f"All of it is in {self.folder}"
                    told = UserError(failure.what, how, exit_code=5)
                    if error:
                        return warn(str(told))
                    raise told from None
            time.sleep(_PAUSE)


# Exchanges


def _cache(kind: str, url: str) -> Path:
    """Returns where in the cache something at a URL has its place."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    key = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:12]
    return cache / "gpt2-jax" / kind / f"{Path(url).name.partition(' ')[0]}-{key}"


@contextlib.contextmanager
def _reaching(url: str) -> Iterator[tuple[AbstractFileSystem, str]]:
    """Yields a URL's file system and its path there, and tells what fails there in one line."""
    try:
        store, root = fsspec.url_to_fs(url, use_listings_cache=False)
        yield store, root.rstrip("/")
    except UserError:
        raise
    # Of each driver's own kinds; a missing one names its package.
    except Exception as error:
        told = f"{type(error).__name__}: {error}".partition("\n")[0]
        what = f"{url} cannot be reached ({told})"
        raise UserError(what, "Mend that, and repeat") from error


@contextlib.contextmanager
def _exchange(url: str, folder: Path) -> Iterator[tuple[AbstractFileSystem, _Record]]:
    """Yields the folder at a URL, and the record of its working copy, which it keeps in the end."""
    lock = folder.with_name(f".{folder.name}.exchange")
    with files.locked(lock), _reaching(url) as (store, root):
        record = _read_record(folder)[1]
        yield DirFileSystem(root, store), record
        files.write_json(folder / RECORD, {"url": url, "files": record})


def _read_record(folder: Path) -> tuple[str, _Record]:
    """Returns the URL of a working copy, and what its store held at the last exchange."""
    path = folder / RECORD
    if not path.exists():
        return "", {}
    tree = json.loads(path.read_text())
    return tree["url"], {name: _Known(*file) for name, file in tree["files"].items()}


def _version(info: Mapping[str, object]) -> int:
    """Returns a number for what a store tells of a file; the URL that it redirects to may vary."""
    told = sorted((name, str(value)) for name, value in info.items() if name != "url")
    return zlib.crc32(str(told).encode())


def _list_store(store: AbstractFileSystem) -> dict[str, int]:
    """Returns the version of each file of a folder in a store."""
    store.invalidate_cache()
    found = store.find("", detail=True)
    names = (name for name in found if not name.endswith("/"))
    return {name: _version(found[name]) for name in names if not _HIDDEN.match(name)}


def _list_copy(folder: Path) -> dict[str, int]:
    """Returns the time of each file of a working copy, in ns."""
    found = dict[str, int]()
    for root, _, names in os.walk(folder):
        for path in (Path(root, name) for name in names):
            with contextlib.suppress(FileNotFoundError):  # a run is at work
                found[path.relative_to(folder).as_posix()] = path.stat().st_mtime_ns
    return {name: found[name] for name in found if not _HIDDEN.match(name)}


def _step(name: str) -> int:
    """Returns the step of the checkpoint that a file belongs to, -1 if to none."""
    checkpoint = _STEP.match(name)
    return int(checkpoint[2]) if checkpoint else -1


def _mark(name: str) -> str:
    """Returns the name of what marks a file as one of a whole checkpoint; else its own."""
    checkpoint = _STEP.match(name)
    return f"{checkpoint[1]}/digests/digests" if checkpoint else name


def _marks(names: Iterable[str]) -> set[str]:
    """Returns those of the files that mark others as whole."""
    return set(filter(_MARK.fullmatch, names))


def _newest_step(names: Iterable[str]) -> int:
    """Returns the newest step of which files hold the whole checkpoint, -1 without any."""
    return max(map(_step, _marks(names)), default=-1)


def _fetch_missing(
    store: AbstractFileSystem, folder: Path, record: _Record, names: Iterable[str]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    missing = {name for name in names if not (folder / name).exists()}
    _in_order(missing, lambda name: _get(store, name, folder / name))
    for name in missing:
        mtime = (folder / name).stat().st_mtime_ns
        record[name] = record[name]._replace(time=mtime)


def _in_order(
    names: set[str], job: Callable[[str], None], marks_first: bool = False
) -> None:
    """Does a job for each file, several at once; marks come last, or first."""
    marks = _marks(names)
    groups = [names - marks, marks]
    if marks_first:
        groups.reverse()
    with ThreadPoolExecutor(8) as pool:
        for group in groups:
            list(pool.map(job, sorted(group)))


def _get(store: AbstractFileSystem, source: str, path: Path, size: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    store.get_file(source, str(partial))
    found = partial.stat().st_size
    if size and found != size:  # else half a file would pass for all
        partial.unlink()
        raise OSError(f"it sent {found} of {size} bytes")
    partial.replace(path)


def _put(store: AbstractFileSystem, path: Path, target: str) -> None:
    if path.stat().st_size < 1 << 26:  # at once, since a run may be adding to it
        store.pipe_file(target, path.read_bytes())
    else:
        store.put_file(str(path), target)


def _remove(store: AbstractFileSystem, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        store.rm_file(name)
