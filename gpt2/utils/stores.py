"""Files and folders at URLs (gs://, s3://, hf://, https://, ...), with local working copies.

A folder at a URL, called a store, has a working copy in the cache of this machine. `fetch` updates
the working copy from the store, and `push` sends new and changed files to the store. Each call of
`fetch` or `push` is a sync. The working copy contains a record of the store's files at the last
sync. The files of a checkpoint or a prepared corpus count as complete if its completion marker
exists. A completion marker is therefore written after these files, and removed before them. The
weights in checkpoints are not fetched until they are read.

A file that is missing in the working copy stays in the store, and a file that is missing in the
store stays in the working copy. The exceptions are samples.txt, and the files of a checkpoint that
a newer checkpoint has replaced.
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
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.utils import tokenize

from gpt2.errors import UserError, warn
from gpt2.utils import files

# Matches the files of a Hugging Face model that this project reads: JSON and safetensors files,
# except those in subfolders.
HUGGING_FACE = r"[^/]+\.(json|safetensors)$"
RECORD = ".store.json"
_OWNER = ".owner"  # contains a random key of the run that began last
_STEP = re.compile(r"(.*checkpoints/(\d+))/")
_WEIGHTS = re.compile(r".*checkpoints/\d+/(params|rest|guard)/")
_MARK = re.compile(r"(.*/)?(digests/digests|prepared\.json)")
_HIDDEN = re.compile(r"damaged/|(.*/)?(\.|.*(/$|\.tmp$|\.orbax-checkpoint-tmp))")


def is_url(path: object) -> bool:
    """Return whether a path is a URL."""
    return "://" in str(path)


# Single files


class Remote(NamedTuple):
    """A file at a URL, as it was when its folder was listed."""

    url: str
    size: int
    version: str  # changes whenever the content may have changed

    def __str__(self) -> str:
        return self.url


def find(pattern: str) -> list[Remote]:
    """Return the files that match `pattern`, a URL that may contain wildcards, in sorted order."""
    remotes = list[Remote]()
    with _connect(pattern) as (store, root):
        if "http" in store.protocol:  # HTTP cannot list files
            infos = {root: store.info(root)}
        else:
            infos = store.glob(root, detail=True)
        for name, info in infos.items():
            if info["type"] == "file":
                url = store.unstrip_protocol(name)
                remotes.append(Remote(url, info.get("size") or 0, _version(info)))
    return sorted(remotes)


def find_folders(prefix: str, mark: str) -> list[str]:
    """Return the names of the folders whose paths begin with `prefix` and that contain `mark`.

    `prefix` is a path or URL that ends within a folder's name. `mark` is the name of a file. The
    folder whose `mark` was written last is at the end.
    """
    with _connect(prefix) as (store, root):
        times = dict[str, datetime]()
        for folder in store.glob(root.replace("[", "[[]") + "*"):
            if store.exists(f"{folder}/{mark}"):
                name = folder.rpartition("/")[2]
                times[name] = store.modified(f"{folder}/{mark}")
    return sorted(times, key=times.__getitem__)


def local_path(file: Path | Remote) -> Path:
    """Return the local path of a file. Fetch a remote file into the cache first."""
    if isinstance(file, Path):
        return file
    url = file.url.partition("?")[0]
    path = _cache("files", f"{file.url} {file.version}") / Path(url).name
    # A power loss may have truncated a file in the cache.
    if not path.exists() or file.size not in (0, path.stat().st_size):
        with _connect(file.url) as (store, root):
            _get(store, root, path, file.size)
    return path


def fetch_file(path: str | Path) -> Path:
    """Return the local path of a JSON file, given its path or URL.

    If the file is at a URL, first fetch all JSON files of its folder.
    """
    folder, name = os.path.split(path)
    return fetch(folder, r"[^/]+\.json$") / name


@contextlib.contextmanager
def writing(target: str | Path) -> Iterator[Path]:
    """Yield a local path at which the `with` block writes a new file or folder.

    If `target` is a URL, upload the file or folder when the block ends. Otherwise, the yielded path
    is `target`.
    """
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
                raise UserError(f"{target} already exists", "Give another URL")
            else:
                push(target, path)


# Folders


class TakenOver(UserError):
    """The error raised when another run has begun at the URL to which this run uploads."""


@dataclasses.dataclass
class _Record:
    """The files of a store at the last sync (`fetch` or `push`) with a working copy."""

    url: str = ""
    folder: str = ""  # the path of the working copy
    # File name -> version.
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    # The modification times of the files in the working copy, in ns.
    times: dict[str, int] = dataclasses.field(default_factory=dict)
    owner: str = ""  # the key that the run of the working copy has written to the store

    def holds(self, name: str, time_ns: int) -> bool:
        """Return whether the file `name` of the working copy is unchanged since the last sync.

        `time_ns` is its modification time now.
        """
        return name in self.versions and self.times.get(name) == time_ns


def local_folder(path: str | Path) -> Path:
    """Return the working copy of `path` if it is a URL, otherwise `path` with `~` expanded."""
    if is_url(path):
        return _cache("stores", str(path))
    return _expand(path)


def url_or_path(folder: Path) -> str:
    """Return how to name `folder` in a message: its URL if it is a working copy, else its path."""
    return _read_record(folder).url or str(folder)


def fetch(path: str | Path, only: str = "") -> Path:
    """Return a local folder for `path`. If `path` is a URL, first update its working copy.

    `only` is a regular expression for the names of the files to fetch. If a process trains in the
    working copy, nothing is updated. Local files that have not been uploaded yet are never
    replaced: if another run has changed the store since the last sync, a working copy with such
    files is renamed, and the store is fetched into a new folder. If the store's newest checkpoint
    is then older than at the last sync, a UserError is raised instead.
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
    """If `folder` is a working copy, fetch the files in `names` that do not exist in it."""
    url = _read_record(folder).url
    if url and not all((folder / name).exists() for name in names):
        with _exchange(url, folder) as (store, record):
            _get_missing(store, record, folder, record.versions.keys() & names)


def push(url: str | Path, folder: Path) -> None:
    """Upload the files of the working copy `folder` that are new or changed since the last sync.

    Remove a checkpoint from the store if the working copy has replaced it with a newer one, and
    samples.txt if the working copy no longer contains this file. Raise `TakenOver` if another run
    has begun at the URL. If `url` is a local path, do nothing.
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
            # A run that continues removes samples.txt, because this file marks a finished run.
            if is_superseded or name == "samples.txt":
                gone.add(name)
        if not changed and not gone:
            return
        if record.owner and not _is_owner(store, record):
            raise TakenOver(f"Another run has taken over {url}")
        # Hard links preserve files that the run removes while they are being sent.
        links = folder.with_name(f".{folder.name}.sending")
        shutil.rmtree(links, ignore_errors=True)  # a killed process may have left links
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
    """Register the run in the working copy `folder` as the newest run at `url`, and push its files.

    If an earlier run still trains at this URL, its next `push` then raises `TakenOver`.
    """
    with _exchange(url, folder) as (store, record):
        record.owner = secrets.token_hex(8)
        store.pipe_file(_OWNER, record.owner.encode())
    push(url, folder)


def completion_markers(folder: Path) -> set[str]:
    """Return the names of the completion markers in a working copy.

    A completion marker is a file that marks a checkpoint or a prepared corpus as complete.
    """
    return set(filter(_is_mark, _list_copy(folder)))


# Syncs


def _is_owner(store: AbstractFileSystem, record: _Record) -> bool:
    """Return whether the run in this working copy is the newest run that `claim` has registered.

    If so, no other run has written to the store since then. If the store nevertheless differs from
    `record`, the last sync was interrupted.
    """
    return store.exists(_OWNER) and store.cat_file(_OWNER).decode() == record.owner


def _make_way(folder: Path, record: _Record, listed: Mapping[str, str]) -> None:
    """Prepare a working copy for the files that another run has written to the store.

    `listed` contains the versions of the files that are now in the store. For each local file:

        changed since the last sync            rename the working copy, which preserves the file
        unchanged, but missing in the store    the same, unless its checkpoint is superseded
        unchanged, but replaced or superseded  delete the file
        unchanged here and in the store        keep the file

    Raise a UserError if the store's newest checkpoint is older than at the last sync.
    """
    step = _newest_step(record.versions)
    newest = _newest_step(listed)
    if step > newest:
        raise UserError(
            f"{record.url} has lost checkpoint {step}, but {folder} is a local copy of the run",
            "Copy the folder to the URL or, to continue without the checkpoint, move the folder "
            "elsewhere",
        )
    record.owner = ""
    outdated = set[Path]()
    for name, time_ns in _list_copy(folder).items():
        is_superseded = 0 <= _step(name) < newest
        if not record.holds(name, time_ns) or not (name in listed or is_superseded):
            aside = folder.with_name(f"{folder.name}-{time.time_ns()}")
            folder.rename(aside)
            record.times.clear()
            warn(f"{record.url} has changed, so its local copy was moved to {aside}")
            return
        if listed.get(name) != record.versions[name]:
            outdated.add(folder / name)
    for path in outdated:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the folder may contain other files
            os.removedirs(path.parent)


def _expand(path: str | Path) -> Path:
    """Return a path with `~` replaced by the home directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        remedy = "Set HOME, or GPT2_DATA_DIR and XDG_CACHE_HOME"
        raise UserError(f"{path}: this user has no home directory", remedy) from error


def _cache(kind: str, url: str) -> Path:
    """Return the path in this machine's cache for the content of a URL.

    `kind` is the subfolder of the cache. The path contains a hash of `url`, so that no two URLs
    have the same path.
    """
    cache = _expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    digest = hashlib.sha256(url.rstrip("/").encode()).hexdigest()
    name = Path(url).name.partition(" ")[0]
    return cache / "gpt2-jax" / kind / f"{name}-{digest[:12]}"


@contextlib.contextmanager
def _connect(url: str) -> Iterator[tuple[AbstractFileSystem, str]]:
    """Yield the file system of a URL and the path in it. Turn any failure into a UserError."""
    # Drivers raise errors of their own types. If a driver is missing, fsspec names its package.
    with files.reading(url, "Fix the cause, and try again", failed="cannot be reached"):
        store, root = fsspec.url_to_fs(url, use_listings_cache=False)
        store.auto_mkdir = True  # otherwise file:// does not create folders
        if "http" in store.protocol:
            import aiohttp

            # A large file may take longer than five minutes, the default time limit.
            store.client_kwargs["timeout"] = aiohttp.ClientTimeout(sock_read=60)
        yield store, root.rstrip("/")


@contextlib.contextmanager
def _exchange(url: str, folder: Path) -> Iterator[tuple[AbstractFileSystem, _Record]]:
    """Yield the file system of the folder at a URL, and the record of its working copy `folder`.

    The body of `with` transfers files and updates the record, which is saved afterwards. Only one
    process at a time executes the body for a folder.
    """
    lock = folder.with_name(f".{folder.name}.exchange")
    with files.locked(lock), _connect(url) as (store, root):
        record = _read_record(folder)
        record.url = url
        record.folder = str(folder.resolve())
        yield DirFileSystem(root, store), record
        folder.mkdir(parents=True, exist_ok=True)
        files.write_json(folder / RECORD, vars(record))


def _read_record(folder: Path) -> _Record:
    path = folder / RECORD
    if not path.exists():
        return _Record()
    remedy = (
        f"Move {folder} elsewhere, and repeat the command, which then downloads its files again. "
        "Files that were not uploaded are only in the moved folder"
    )
    with files.reading(path, remedy):
        record = _Record(**json.loads(path.read_bytes()))
    # If the user has copied a working copy elsewhere, this copy is an ordinary local folder, which
    # must not be uploaded.
    return record if record.folder == str(folder.resolve()) else _Record()


def _version(info: Mapping[str, object]) -> str:
    """Return a string that changes when a file in a store changes.

    It is a hash of `info`, the file system's information about the file, such as size and time. The
    URL is left out, because it may change with every redirect.
    """
    return tokenize({**info, "url": ""})


def _list_store(store: AbstractFileSystem) -> dict[str, str]:
    """Return a dict from each file in a store to its version, without hidden and partial files."""
    store.invalidate_cache()
    infos = store.find("", detail=True)
    return {name: _version(infos[name]) for name in infos if not _HIDDEN.match(name)}


def _list_copy(folder: Path) -> dict[str, int]:
    """Return a dict from each file in a working copy to its modification time in ns.

    Hidden and partial files are left out.
    """
    times = dict[str, int]()
    for root, _, names in os.walk(folder):  # a run may remove files in the meantime
        for path in (Path(root, name) for name in names):
            name = path.relative_to(folder).as_posix()
            with contextlib.suppress(FileNotFoundError):
                if not _HIDDEN.match(name):
                    times[name] = path.stat().st_mtime_ns
    return times


def _step(name: str) -> int:
    """Return the step of the checkpoint that contains the file `name`, or -1 if none does."""
    checkpoint = _STEP.match(name)
    return int(checkpoint[2]) if checkpoint else -1


def _mark(name: str) -> str:
    """Return the name of the completion marker of the checkpoint that contains the file `name`.

    If the file is in no checkpoint, return `name`, because it is complete by itself.
    """
    checkpoint = _STEP.match(name)
    return f"{checkpoint[1]}/digests/digests" if checkpoint else name


def _is_mark(name: str) -> bool:
    """Return whether a file marks a checkpoint or a prepared corpus as complete."""
    return _MARK.fullmatch(name) is not None


def _newest_step(names: Iterable[str]) -> int:
    """Return the step of the newest complete checkpoint among the files `names`, or -1."""
    return max(map(_step, filter(_is_mark, names)), default=-1)


def _in_order(names: set[str], job: Callable[[str], None]) -> None:
    """Call `job(name)` for each file, several at a time.

    Completion markers come last, so that they never exist without the files that they mark.
    """
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
    if size and received != size:  # otherwise a partial file would be accepted
        partial.unlink()
        raise OSError(f"only {received} of {size} bytes were received")
    partial.replace(path)


def _put(store: AbstractFileSystem, path: Path, target: str) -> None:
    # A run may append to a small file while it is sent, so its content is read in one call.
    if path.stat().st_size < 1 << 26:
        store.pipe_file(target, path.read_bytes())
    else:
        store.put_file(str(path), target)
