"""Places by URL (gs://, s3://, hf://, https://, ...), by way of this machine's disk.

A folder at a URL has a working copy in the cache, and in it a record of what the store held at the
last exchange. `fetch` brings the copy up to date, `push` sends what it has gained. What marks other
files as whole comes last and goes first. Weights are fetched when somebody reads them.

Nothing is removed on one side because it is missing on the other: a checkpoint goes only where a
newer one has taken its place.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.utils import tokenize

from gpt2.errors import UserError, warn
from gpt2.utils import files

# A model's files, without other frameworks'.
HUGGING_FACE = r"[^/]+\.(json|safetensors)$"
RECORD = ".store.json"
_OWNER = ".owner"  # holds a key of the run that began last
_SAMPLES = "samples.txt"
_STEP = re.compile(r"(.*checkpoints/(\d+))/")
_WEIGHTS = re.compile(r".*checkpoints/\d+/(params|rest|guard)/")
_MARK = re.compile(r"(.*/)?(digests/digests|prepared\.json)")
_HIDDEN = re.compile(r"damaged/|(.*/)?(\.|.*(/$|\.tmp$|\.orbax-checkpoint-tmp))")


def is_url(place: object) -> bool:
    """Returns whether a place is a URL, not a path of this machine."""
    return "://" in str(place)


# Single files


class Remote(NamedTuple):
    """A file at a URL, as it was when it was found."""

    url: str
    size: int
    version: str  # differs whenever the content may

    def __str__(self) -> str:
        return self.url


def find(pattern: str) -> list[Remote]:
    """Returns the files that a URL, maybe with wildcards, names: sorted."""
    found = list[Remote]()
    with _reaching(pattern) as (store, root):
        if "http" in store.protocol:  # which lists no files
            infos = {root: store.info(root)}
        else:
            infos = store.glob(root, detail=True)
        for name, info in infos.items():
            if info["type"] == "file":
                url = store.unstrip_protocol(name)
                size = info.get("size") or 0
                found.append(Remote(url, size, _version(info)))
    return sorted(found)


def at_hand(file: Path | Remote) -> Path:
    """Returns where on this machine a file lies: that of a store in the cache, by its own name."""
    if isinstance(file, Path):
        return file
    url = file.url.partition("?")[0]
    path = _cache("files", f"{file.url} {file.version}") / Path(url).name
    # A power loss may have cut it.
    if not path.exists() or file.size not in (0, path.stat().st_size):
        with _reaching(file.url) as (store, root):
            _get(store, root, path, file.size)
    return path


def fetch_file(place: str | Path) -> Path:
    """Returns where a file lies on this machine that a path or a URL names, JSON beside it too."""
    folder, name = os.path.split(place)
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


class TakenOver(UserError):
    """Another run has begun at a URL since."""


@dataclasses.dataclass
class _Record:
    """What a store held at the last exchange with a working copy."""

    url: str
    versions: dict[str, str]  # of its files, by name
    times: dict[str, int]  # ns, of the files in the working copy
    owner: str = ""  # the key that the run of the working copy has left there

    def holds(self, name: str, time_ns: int) -> bool:
        """Returns whether the store held a file of the working copy as it was at a time."""
        return name in self.versions and self.times.get(name) == time_ns


def copy_of(place: str | Path) -> Path:
    """Returns the folder on this machine that a path or a URL names: of a URL, the working copy."""
    if is_url(place):
        return _cache("stores", str(place))
    return Path(place).expanduser()


def place_of(folder: Path) -> str:
    """Returns the URL of a working copy, of another folder its path."""
    return _read_record(folder).url or str(folder)


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
        is_ours = _is_ours(store, record)
        if theirs != record.versions and not is_ours:
            _make_way(folder, record, theirs)
        record.versions = theirs
        wanted = set[str]()
        for name in theirs:
            is_whole = _mark(name) in theirs
            if is_whole and re.match(only, name) and not _WEIGHTS.match(name):
                wanted.add(name)
    complete(folder, wanted)
    return folder


def _is_ours(store: AbstractFileSystem, record: _Record) -> bool:
    """Returns whether the run that has begun last in a store is that of this working copy.

    Its last exchange may have been cut short, and nobody else has written there.
    """
    return store.exists(_OWNER) and store.cat_file(_OWNER).decode() == record.owner


def _make_way(folder: Path, record: _Record, theirs: Mapping[str, str]) -> None:
    """Removes from a working copy what another run has replaced in the store."""
    step = _newest_step(record.versions)
    newest = _newest_step(theirs)
    if step > newest:
        what = (
            f"{record.url} has lost checkpoint {step}; {folder} is this machine's copy"
        )
        raise UserError(what, f"Copy that to {record.url}, or move it elsewhere")
    record.owner = ""
    outdated = set[Path]()
    for name, mtime in _list_copy(folder).items():
        is_superseded = 0 <= _step(name) < newest
        if not record.holds(name, mtime) or not (name in theirs or is_superseded):
            aside = folder.with_name(f"{folder.name}-{time.time_ns()}")
            folder.rename(aside)
            record.times.clear()
            warn(f"{record.url} has changed; what this machine had is in {aside}")
            return
        if theirs.get(name) != record.versions[name]:
            outdated.add(folder / name)
    for path in outdated:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # its folder holds others
            os.removedirs(path.parent)


def complete(folder: Path, names: Iterable[str]) -> None:
    """Fetches those files of a working copy that it lacks; of another folder there are none."""
    if not _missing(folder, names):
        return
    with _exchange(place_of(folder), folder) as (store, record):
        missing = _missing(folder, names)  # another process may have fetched some
        _in_order(missing, lambda name: _get(store, name, folder / name))
        for name in missing:
            record.times[name] = (folder / name).stat().st_mtime_ns


def _missing(folder: Path, names: Iterable[str]) -> set[str]:
    known = _read_record(folder).versions.keys() & names
    return {name for name in known if not (folder / name).exists()}


def push(place: str | Path, folder: Path) -> None:
    """Sends a URL what its working copy has gained since the last exchange.

    A checkpoint goes there as it goes here, since a newer one has taken its place. What another run
    has taken over is not written.
    """
    if not is_url(place):
        return
    kept = folder.with_name(f".{folder.name}.sending")
    with _exchange(str(place), folder) as (store, record):
        here = _list_copy(folder)
        newest = _newest_step(here)
        changed = set[str]()
        for name, mtime in here.items():
            if not record.holds(name, mtime):
                changed.add(name)
        gone = set[str]()
        for name in record.versions.keys() - here.keys():
            is_superseded = 0 <= _step(name) < newest and _mark(name) not in here
            # A run that goes on removes its samples, which would say that it has ended.
            if is_superseded or name == _SAMPLES:
                gone.add(name)
        if not changed and not gone:
            return
        if record.owner and not _is_ours(store, record):
            raise TakenOver(f"another run has taken {place} over")
        # What the run removes meanwhile stays there until it is sent.
        shutil.rmtree(kept, ignore_errors=True)  # of a process that was killed
        missed = set[str]()
        for name in changed:
            copy = kept / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(folder / name, copy)
            except FileNotFoundError:
                missed.add(_mark(name))
        changed = {name for name in changed if _mark(name) not in missed}
        _in_order(changed, lambda name: _put(store, kept / name, name))
        marks = _marks(gone)
        for name in (*marks, *(gone - marks)):
            with contextlib.suppress(FileNotFoundError):
                store.rm_file(name)
        record.versions = _list_store(store)
        record.times = here
        shutil.rmtree(kept, ignore_errors=True)


def claim(place: str, folder: Path) -> None:
    """Makes the run of a working copy the one that has begun last at its URL."""
    with _exchange(place, folder) as (store, record):
        record.owner = secrets.token_hex(8)
        store.pipe_file(_OWNER, record.owner.encode())
    push(place, folder)


def whole_parts(folder: Path) -> set[str]:
    """Returns what marks the whole checkpoints of a working copy."""
    return _marks(_list_copy(folder))


# Exchanges


def _cache(kind: str, url: str) -> Path:
    """Returns where in the cache something at a URL has its place."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    digest = hashlib.sha256(url.rstrip("/").encode()).hexdigest()
    name = Path(url).name.partition(" ")[0]
    return cache / "gpt2-jax" / kind / f"{name}-{digest[:12]}"


@contextlib.contextmanager
def _reaching(url: str) -> Iterator[tuple[AbstractFileSystem, str]]:
    """Yields a URL's file system and its path there, and tells what fails there in one line."""
    # Of each driver's own kinds; a missing one names its package.
    with files.reading(url, "Mend that, and repeat", failed="cannot be reached"):
        store, root = fsspec.url_to_fs(url, use_listings_cache=False)
        store.auto_mkdir = True  # that of file://, which makes no folder unasked
        if "http" in store.protocol:
            import aiohttp

            # A large file may take longer than the five minutes that are usual there.
            store.client_kwargs["timeout"] = aiohttp.ClientTimeout(sock_read=60)
        yield store, root.rstrip("/")


@contextlib.contextmanager
def _exchange(url: str, folder: Path) -> Iterator[tuple[AbstractFileSystem, _Record]]:
    """Yields the folder at a URL, and the record of its working copy, which it keeps in the end."""
    lock = folder.with_name(f".{folder.name}.exchange")
    with files.locked(lock), _reaching(url) as (store, root):
        record = _read_record(folder)
        record.url = url
        yield DirFileSystem(root, store), record
        folder.mkdir(parents=True, exist_ok=True)
        files.write_json(folder / RECORD, vars(record))


def _read_record(folder: Path) -> _Record:
    path = folder / RECORD
    if path.exists():
        return _Record(**json.loads(path.read_text()))
    return _Record("", {}, {})


def _version(info: Mapping[str, object]) -> str:
    """Returns a hash of what a store tells of a file; the URL that it redirects to may vary."""
    return tokenize({**info, "url": ""})


def _list_store(store: AbstractFileSystem) -> dict[str, str]:
    """Returns the version of each file of a folder in a store."""
    store.invalidate_cache()
    found = dict[str, str]()
    for name, info in store.find("", detail=True).items():
        if not _HIDDEN.match(name):
            found[name] = _version(info)
    return found


def _list_copy(folder: Path) -> dict[str, int]:
    """Returns the time of each file of a working copy, in ns."""
    found = dict[str, int]()
    for root, _, names in os.walk(folder):
        for each in names:
            path = Path(root, each)
            name = path.relative_to(folder).as_posix()
            with contextlib.suppress(FileNotFoundError):  # a run is at work
                if not _HIDDEN.match(name):
                    found[name] = path.stat().st_mtime_ns
    return found


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


def _in_order(names: set[str], job: Callable[[str], None]) -> None:
    """Does a job for each file, several at once; marks come last."""
    marks = _marks(names)
    with ThreadPoolExecutor(8) as pool:
        for group in (names - marks, marks):
            list(pool.map(job, group))


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
