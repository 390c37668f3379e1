"""environment.jsonl: with what a run was made, a line for each of its starts.

`config.json` and `data.json` hold what a run was asked to do. The rest that decides its figures
stands here: the code, the versions of the libraries, the devices. No line holds the machine's name
or its environment variables, which may be secret.
"""

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from gpt2 import __version__
from gpt2.utils.files import write_bytes

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy")
_SOURCE = Path(__file__).parents[2]  # where train.py, gpt2/ and configs/ lie
_GIT_SECONDS = 5  # after which a slow file system leaves commit and state unknown


def record_start(workdir: Path, step: int, batch_shards: int) -> None:
    """Adds a line to a run's environment.jsonl.

    The file is replaced as a whole, so that a kill leaves no part of a line. A part that something
    else left is dropped.

    Args:
        workdir: of the run.
        step: from which it starts, 0 for a new run.
        batch_shards: over how many devices the rows of a batch are split.
    """
    path = workdir / "environment.jsonl"
    line = json.dumps(describe_start(step) | {"batch_shards": batch_shards})
    write_bytes(path, [_whole_lines(path), line.encode(), b"\n"])


def last_start(workdir: Path) -> dict[str, Any]:
    """Returns the line of a run's last start, empty if there is none or it is damaged."""
    lines = _whole_lines(workdir / "environment.jsonl").splitlines()
    try:
        line = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}


def describe_start(step: int) -> dict[str, Any]:
    """Returns the line of a start, in values of JSON.

    `commit` and `clean` are of the checkout that gpt2 lies in, None where there is none. `clean`:
    no Python file there differs from the commit or is new, but for those that git ignores.
    """
    commit, clean = _read_git(_SOURCE)
    return {
        "step": step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "gpt2": __version__,
        "commit": commit,
        "clean": clean,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: _version(name) for name in _LIBRARIES},
        "device_kind": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
    }


def _whole_lines(path: Path) -> bytes:
    text = path.read_bytes() if path.exists() else b""
    return text[: text.rfind(b"\n") + 1]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _read_git(directory: Path) -> tuple[str | None, bool | None]:
    """Returns the commit of the code in `directory`, and whether it is unchanged since.

    None where git does not tell.
    """
    # Code that pip has installed below someone's checkout is no part of that checkout.
    if _git(directory, "ls-files", "--error-unmatch", "gpt2/__init__.py") is None:
        return None, None
    commit = _git(directory, "rev-parse", "HEAD")
    # Other files decide nothing, and the run's own may lie here.
    changes = _git(directory, "status", "--porcelain", "--", "*.py")
    return commit, None if changes is None else not changes


def _git(directory: Path, *arguments: str) -> str | None:
    """Returns what git prints, None if it fails or is missing."""
    # A git hook sets GIT_DIR and the like, which would name another checkout.
    elsewhere = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *arguments],  # read, and leave the index alone
            cwd=directory,
            env={name: value for name, value in os.environ.items() if name not in elsewhere},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
