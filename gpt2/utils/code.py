"""Identify the code of a run: a hash of what decides its results, recorded at each start."""

import ast
import functools
import hashlib
import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from gpt2 import __version__

SOURCE = Path(__file__).parents[2]  # where train.py, gpt2/ and configs/ lie
# Parts of gpt2/ that do not decide the results of a run: they only observe or start it.
_OBSERVERS = {
    "lab",
    "evals",
    "telemetry",
    "cli.py",
    "errors.py",
    "generate.py",
    "signals.py",
}


def hash_code(source: Path = SOURCE) -> str:
    """Return a hash of the code in `source` that decides what a run computes.

    It ignores comments and formatting, and depends on the version of Python.
    """
    package = source / "gpt2"
    paths = [*source.glob("train.py"), *source.glob("configs/default.py")]
    # Editors save files of their own, which begin with a dot.
    for path in package.rglob("[!.]*.py"):
        if path.relative_to(package).parts[0] not in _OBSERVERS:
            paths.append(path)
    digest = hashlib.sha256()
    for path in sorted(paths):
        name = path.relative_to(source)
        digest.update(f"{name}\n{_bare(path.read_bytes())}\n".encode())
    return digest.hexdigest()[:12]


@functools.cache  # a sweep hashes the code before each run
def _bare(text: bytes) -> str:
    """Return a file's syntax tree as text, without comments and line numbers."""
    try:
        return ast.dump(ast.parse(text))
    except (SyntaxError, ValueError):  # an editor is saving it
        return repr(text)


def git(source: Path, *arguments: str, seconds: float = 5) -> str | None:
    """Return what git prints in a folder; None if it fails, is missing or takes too long."""
    command = ["git", "--no-optional-locks", "-C", str(source), *arguments]
    try:  # with a time limit, because network file systems may be slow
        done = subprocess.run(
            command, capture_output=True, check=True, text=True, timeout=seconds
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def describe_start(step: int) -> dict[str, Any]:
    """Return a line of environment.jsonl: what decides a run's results besides options and data.

    It contains no host name and no environment variables. `code` comes from `hash_code`. `commit`
    and `clean` (no Python file differs from the commit) are None unless gpt2 is a git checkout.
    """
    # git may answer for another project's checkout that contains an installed gpt2.
    commit = None
    changed = None
    if git(SOURCE, "ls-files", "gpt2/__init__.py"):
        commit = git(SOURCE, "rev-parse", "HEAD")
        changed = git(SOURCE, "status", "--porcelain", "*.py")
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    return {
        "step": step,
        "time": datetime.now(UTC).isoformat(),
        "command": sys.argv,
        "gpt2": __version__,
        "code": hash_code(),
        "commit": commit,
        "clean": None if changed is None else not changed,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: version(name) for name in packages},
        "device_kind": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
    }


def read_starts(workdir: Path) -> list[dict]:
    """Return the lines of environment.jsonl whose steps are still part of the run, oldest first.

    A start from step N discards all later steps of the starts before it.
    """
    path = workdir / "environment.jsonl"
    if not path.exists():
        return []
    starts = list[dict]()
    for line in path.read_text("utf-8").splitlines():
        start = json.loads(line)
        starts = [each for each in starts if each["step"] < start["step"]]
        starts.append(start)
    return starts
