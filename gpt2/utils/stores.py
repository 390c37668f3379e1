"""Files and folders at URLs (gs://, s3://, hf://, https://, ...), by way of this machine's disk.

A folder at a URL has a working copy in the cache. The copy holds a record of what the store held at
the last exchange. `fetch` updates the copy, and `push` sends what the copy has gained. Files that
mark others as whole are written last and removed first. Weights are fetched when they are read.

A file that is missing on one side is not removed on the other, except for checkpoints that a newer
one has replaced.
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

# The files of a model at Hugging Face, without files for other frameworks.
HUGGING_FACE = r"[^/]+\.(json|safetensors)$"
RECORD = ".store.json"
_OWNER = ".owner"  # holds a random key of the run that began last
_STEP = re.compile(r"(.*checkpoints/(\d+))/")
_WEIGHTS = re.compile(r".*checkpoints/\d+/(params|rest|guard)/")
_MARK = re.compile(r"(.*/)?(digests/digests|prepared\.json)")
_HIDDEN = re.compile(r"damaged/|(.*/)?(\.|.*(/$|\.tmp$|\.orbax-checkpoint-tmp))")


def is_url(path: object) -> bool:
    """Return whether a path is a URL."""
    return "://" in str(path)


# Single files


class Remote(NamedTuple):
    """A file at a URL, as it was when it was listed."""

    url: str
    size: int
    version: str  # differs whenever the content may differ

    def __str__(self) -> str:
        return self.url


def find(pattern: str) -> list[Remote]:
    """Return the files that match a URL, which may contain wildcards, in sorted order."""
    remotes = list[Remote]()
    with _connect(pattern) as (store, root):
        if "http" in store.protocol:  # the web cannot list files
            infos = {root: store.info(root)}
        else:
            infos = store.glob(root, detail=True)
        for name, info in infos.items():
            if info["type"] == "file":
                url = store.unstrip_protocol(name)
                remotes.append(Remote(url, info.get("size") or 0, _version(info)))
    return sorted(remotes)


def local_path(file: Path | Remote) -> Path:
    """Return the path of a file on this machine: a remote file is fetched into the cache."""
    if isinstance(file, Path):
        return file
    url = file.url.partition("?")[0]
    path = _cache("files", f"{file.url} {file.version}") / Path(url).name
    # A power loss may have cut a file in the cache.
    if not path.exists() or file.size not in (0, path.stat().st_size):
        with _connect(file.url) as (store, root):
            _get(store, root, path, file.size)
    return path


def fetch_file(path: str | Path) -> Path:
    """Return the local path of a file at a path or a URL, with the JSON files next to it."""
    folder, name = os.path.split(path)
    return fetch(folder, r"[^/]+\.json$") / name


@contextlib.contextmanager
def writing(target: str | Path) -> Iterator[Path]:
    """Yield a local path for a new file or folder, which is sent to `target` if that is a URL."""
    if not is_url(target):
        path = _expand(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / Path(target).name
        yield path
        with _connect(str(target)) as (store, root):
            if path.is_file():
                _put(store, path, root)
            elif store.exists(root):
                raise UserError(f"{target} exists already", "Give another URL")
            else:
                push(target, path)


# Folders


class TakenOver(UserError):
    """Another run has begun at the URL since."""


@dataclasses.dataclass
class _Record:
    """What a store held at the last exchange with a working copy."""

    url: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)  # by file name
    # In ns, of the files in the working copy.
    times: dict[str, int] = dataclasses.field(default_factory=dict)
    owner: str = ""  # the key that the run of the working copy has written to the store

    def holds(self, name: str, time_ns: int) -> bool:
        """Return whether the store held a file of the working copy, last changed at a time."""
        return name in self.versions and self.times.get(name) == time_ns


def local_folder(path: str | Path) -> Path:
    """Return the local folder for a path or a URL: the working copy of a URL."""
    if is_url(path):
        return _cache("stores", str(path))
    return _expand(path)


def url_or_path(folder: Path) -> str:
    """Return the URL of a working copy, or the path of another folder."""
    return _read_record(folder).url or str(folder)


def fetch(path: str | Path, only: str = "") -> Path:
    """Return the local folder for a path or a URL, updated from the store.

    Local files that were not sent stay, unless another run has written to the store since. In that
    case the working copy is moved aside. A store that has lost checkpoints is refused. `only` is a
    pattern for the names of the files to fetch.
    """
    folder = local_folder(path)
    is_training = files.is_locked(folder / ".lock")
    if not is_url(path) or is_training:
        return folder
    with _exchange(str(path), folder) as (store, record):
        listed = _list_store(store)
        if listed != record.versions and not _is_owner(store, record):
            _make_way(folder, record, listed)
        record.versions = listed
        wanted = set[str]()
        for name in listed:
            is_whole = _mark(name) in listed
            if is_whole and re.match(only, name) and not _WEIGHTS.match(name):
                wanted.add(name)
        _get_missing(store, record, folder, wanted)
    return folder


def complete(folder: Path, names: Iterable[str]) -> None:
    """Fetch the named files that a working copy lacks; other folders stay as they are."""
    url = _read_record(folder).url
    if url and not all((folder / name).exists() for name in names):
        with _exchange(url, folder) as (store, record):
            _get_missing(store, record, folder, record.versions.keys() & names)


def push(url: str | Path, folder: Path) -> None:
    """Send what a working copy has gained since the last exchange to its URL.

    A checkpoint that is gone here is removed there once a newer one has replaced it. Raises
    `TakenOver` if another run has begun at the URL.
    """
    if not is_url(url):
        return
    with _exchange(str(url), folder) as (store, record):
        here = _list_copy(folder)
        newest = _newest_step(here)
        changed = {name for name in here if not record.holds(name, here[name])}
        gone = set[str]()
        for name in record.versions.keys() - here.keys():
            is_superseded = 0 <= _step(name) < newest and _mark(name) not in here
            # A run that continues removes its samples, which mark a finished run.
            if is_superseded or name == "samples.txt":
                gone.add(name)
        if not changed and not gone:
            return
        if record.owner and not _is_owner(store, record):
            raise TakenOver(f"Another run has taken over {url}")
        # Links keep the files that the run removes while they are sent.
        links = folder.with_name(f".{folder.name}.sending")
        shutil.rmtree(links, ignore_errors=True)  # a killed process may have left it
        missed = set[str]()
        for name in changed:
            link = links / name
            link.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(folder / name, link)
            except FileNotFoundError:
                missed.add(_mark(name))
        changed = {name for name in changed if _mark(name) not in missed}
        _in_order(changed, lambda name: _put(store, links / name, name))
        for name in sorted(gone, key=_is_mark, reverse=True):
            with contextlib.suppress(FileNotFoundError):
                store.rm_file(name)
        record.versions = _list_store(store)
        record.times = here
        shutil.rmtree(links, ignore_errors=True)


def claim(url: str, folder: Path) -> None:
    """Register the run of a working copy as the newest one at its URL, and push its files."""
    with _exchange(url, folder) as (store, record):
        record.owner = secrets.token_hex(8)
        store.pipe_file(_OWNER, record.owner.encode())
    push(url, folder)


def whole_checkpoints(folder: Path) -> set[str]:
    """Return the files that mark whole checkpoints in a working copy."""
    return set(filter(_is_mark, _list_copy(folder)))


# Exchanges


def _is_owner(store: AbstractFileSystem, record: _Record) -> bool:
    """Return whether the run that began last in a store is that of this working copy.

    If so, nobody else has written there, although the last exchange may have been interrupted.
    """
    return store.exists(_OWNER) and store.cat_file(_OWNER).decode() == record.owner


def _make_way(folder: Path, record: _Record, listed: Mapping[str, str]) -> None:
    """Remove the files from a working copy that another run has replaced in the store."""
    step = _newest_step(record.versions)
    newest = _newest_step(listed)
    if step > newest:
        raise UserError(
            f"{record.url} has lost checkpoint {step}; {folder} is this machine's copy",
            f"Copy that to {record.url}, or move it elsewhere",
        )
    record.owner = ""
    outdated = set[Path]()
    for name, time_ns in _list_copy(folder).items():
        is_superseded = 0 <= _step(name) < newest
        if not record.holds(name, time_ns) or not (name in listed or is_superseded):
            aside = folder.with_name(f"{folder.name}-{time.time_ns()}")
            folder.rename(aside)
            record.times.clear()
            warn(f"{record.url} has changed; what this machine had is in {aside}")
            return
        if listed.get(name) != record.versions[name]:
            outdated.add(folder / name)
    for path in outdated:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the folder holds other files
            os.removedirs(path.parent)


def _expand(path: str | Path) -> Path:
    """Return a path with the home directory in place of `~`."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        remedy = "Set HOME, or GPT2_DATA_DIR and XDG_CACHE_HOME"
        raise UserError(f"{path}: this user has no home directory", remedy) from error


def _cache(kind: str, url: str) -> Path:
    """Return the path in the cache for what lies at a URL."""
    cache = _expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    digest = hashlib.sha256(url.rstrip("/").encode()).hexdigest()
    name = Path(url).name.partition(" ")[0]
    return cache / "gpt2-jax" / kind / f"{name}-{digest[:12]}"


@contextlib.contextmanager
def _connect(url: str) -> Iterator[tuple[AbstractFileSystem, str]]:
    """Yield the file system of a URL and the path in it; a failure becomes a UserError."""
    # Drivers raise errors of their own types; for a missing driver, fsspec names the package.
    with files.reading(url, "Fix that, and try again", failed="cannot be reached"):
        store, root = fsspec.url_to_fs(url, use_listings_cache=False)
        store.auto_mkdir = True  # otherwise file:// does not make folders
        if "http" in store.protocol:
            import aiohttp

            # A large file may take longer than the default of five minutes.
            store.client_kwargs["timeout"] = aiohttp.ClientTimeout(sock_read=60)
        yield store, root.rstrip("/")


@contextlib.contextmanager
def _exchange(url: str, folder: Path) -> Iterator[tuple[AbstractFileSystem, _Record]]:
    """Yield the folder at a URL and the record of its working copy, which is saved at the end."""
    lock = folder.with_name(f".{folder.name}.exchange")
    with files.locked(lock), _connect(url) as (store, root):
        record = _read_record(folder)
        record.url = url
        yield DirFileSystem(root, store), record
        folder.mkdir(parents=True, exist_ok=True)
        files.write_json(folder / RECORD, vars(record))


def _read_record(folder: Path) -> _Record:
    path = folder / RECORD
    return _Record(**json.loads(path.read_text())) if path.exists() else _Record()


def _version(info: Mapping[str, object]) -> str:
    """Return a hash of a store's information on a file; the URL of a redirect may vary."""
    return tokenize({**info, "url": ""})


def _list_store(store: AbstractFileSystem) -> dict[str, str]:
    """Return the version of each file of a folder in a store."""
    store.invalidate_cache()
    infos = store.find("", detail=True)
    return {name: _version(infos[name]) for name in infos if not _HIDDEN.match(name)}


def _list_copy(folder: Path) -> dict[str, int]:
    """Return the time of each file of a working copy, in ns."""
    times = dict[str, int]()
    for root, _, names in os.walk(folder):  # safe while a run removes files
        for path in (Path(root, name) for name in names):
            name = path.relative_to(folder).as_posix()
            with contextlib.suppress(FileNotFoundError):
                if not _HIDDEN.match(name):
                    times[name] = path.stat().st_mtime_ns
    return times


def _step(name: str) -> int:
    """Return the step of the checkpoint that a file belongs to, or -1."""
    checkpoint = _STEP.match(name)
    return int(checkpoint[2]) if checkpoint else -1


def _mark(name: str) -> str:
    """Return the file that marks the checkpoint of a file as whole, or the file itself."""
    checkpoint = _STEP.match(name)
    return f"{checkpoint[1]}/digests/digests" if checkpoint else name


def _is_mark(name: str) -> bool:
    """Return whether a file marks others as whole."""
    return _MARK.fullmatch(name) is not None


def _newest_step(names: Iterable[str]) -> int:
    """Return the step of the newest whole checkpoint, or -1."""
    return max(map(_step, filter(_is_mark, names)), default=-1)


def _in_order(names: set[str], job: Callable[[str], None]) -> None:
    """Run a job for each file, several at once, and for marks at the end."""
    marks = set(filter(_is_mark, names))
    with ThreadPoolExecutor(8) as pool:
        for group in (names - marks, marks):
            list(pool.map(job, group))


def _get_missing(
    store: AbstractFileSystem, record: _Record, folder: Path, names: set[str]
) -> None:
    missing = {name for name in names if not (folder / name).exists()}
    _in_order(missing, lambda name: _get(store, name, folder / name))
    for name in missing:
        record.times[name] = (folder / name).stat().st_mtime_ns


def _get(store: AbstractFileSystem, source: str, path: Path, size: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    store.get_file(source, str(partial))
    received = partial.stat().st_size
    if size and received != size:  # otherwise half a file would pass for the whole
        partial.unlink()
        raise OSError(f"it sent {received} of {size} bytes")
    partial.replace(path)


def _put(store: AbstractFileSystem, path: Path, target: str) -> None:
    if path.stat().st_size < 1 << 26:  # read it at once, since a run may append to it
        store.pipe_file(target, path.read_bytes())
    else:
        store.put_file(str(path), target)
