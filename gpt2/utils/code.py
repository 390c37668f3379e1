"""Of which code a run is: a hash of what decides its figures, kept with each of its starts."""

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
# Of gpt2/, what decides no figure of a run: tools, and what only tells of it.
_TOOLS = {
    *("ablate", "benchmark", "evals", "plan", "profile", "telemetry"),
    *("cli.py", "compare.py", "errors.py", "generate.py", "signals.py"),
}


def hash_code(source: Path = SOURCE) -> str:
    """Returns a hash of the code in `source` that decides what a run computes, as it lies on disk.

    Comments and the breaking of lines do not count, the version of Python does.
    """
    package = source / "gpt2"
    paths = [*source.glob("train.py"), *source.glob("configs/default.py")]
    # Editors keep files of their own, with a dot.
    for path in package.rglob("[!.]*.py"):
        if path.relative_to(package).parts[0] not in _TOOLS:
            paths.append(path)
    digest = hashlib.sha256()
    for path in sorted(paths):
        name = path.relative_to(source)
        digest.update(f"{name}\n{_bare(path.read_bytes())}\n".encode())
    return digest.hexdigest()[:12]


@functools.cache  # a sweep asks before each run
def _bare(text: bytes) -> str:
    """Returns a file's syntax tree, without comments and numbers of lines."""
    try:
        return ast.dump(ast.parse(text))
    except (SyntaxError, ValueError):  # somebody is writing it
        return repr(text)


def git(source: Path, *arguments: str, seconds: float = 5) -> str | None:
    """Returns what git prints in a folder, None if it fails, is missing or takes too long."""
    command = ["git", "--no-optional-locks", "-C", str(source), *arguments]
    try:  # file systems may be slow
        done = subprocess.run(
            command, capture_output=True, check=True, text=True, timeout=seconds
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def describe_start(step: int) -> dict[str, Any]:
    """Returns a line of environment.jsonl: what beside options and data decides a run's figures.

    It holds no name of a machine and no environment variables. `code` is a hash; see `hash_code`.
    `commit` and `clean` (no Python file differs from it) are of gpt2's checkout, None without one.
    """
    # Code that pip has installed below someone's checkout is no part of that checkout.
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
    """Returns the lines of environment.jsonl whose steps the run still has, oldest first.

    A start from an earlier step does away with the steps of those before it.
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
