"""Hash the code on which a run's results depend, and describe each start of a run.

A run is started again when it is continued, maybe with other code. The file environment.jsonl in
the run's workdir contains a record of each start.
"""

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

from gpt2 import __version__

SOURCE = Path(__file__).parents[2]  # the folder of train.py, gpt2/ and configs/
# Parts of gpt2/ that cannot change the results of a run, because they only start or observe it.
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
    """Return a hash of the code in the folder `source` that determines what a run computes.

    The hash ignores comments and formatting, but not docstrings. It depends on the version of
    Python, because it is computed from syntax trees. It has 12 hexadecimal digits.
    """
    package = source / "gpt2"
    paths = [*source.glob("train.py"), *source.glob("configs/default.py")]
    # Files whose names begin with a dot are temporary files of editors.
    for path in package.rglob("[!.]*.py"):
        if path.relative_to(package).parts[0] not in _OBSERVERS:
            paths.append(path)
    digest = hashlib.sha256()
    for path in sorted(paths):
        name = path.relative_to(source)
        digest.update(f"{name}\n{_bare(path.read_bytes())}\n".encode())
    return digest.hexdigest()[:12]


def hash_file(path: Path) -> str:
    """Return a hash of one Python file. Like `hash_code`, this ignores comments and formatting."""
    return hashlib.sha256(_bare(path.read_bytes()).encode()).hexdigest()[:12]


@functools.cache  # a sweep hashes the code before each run
def _bare(text: bytes) -> str:
    """Return the syntax tree of a Python file with the content `text`, as a string.

    The tree contains neither comments nor line numbers. If `text` has a syntax error, return `text`
    itself as a string.
    """
    try:
        return ast.dump(ast.parse(text))
    except (SyntaxError, ValueError):  # an editor may be saving the file
        return repr(text)


def git(source: Path, *arguments: str, seconds: float = 5) -> str | None:
    """Return the output of `git ARGUMENTS` in the folder `source`.

    Return None if git is not installed, fails, or takes longer than `seconds`.
    """
    command = ["git", "--no-optional-locks", "-C", str(source), *arguments]
    try:  # with a time limit, because network file systems may be slow
        done = subprocess.run(
            command, capture_output=True, check=True, text=True, timeout=seconds
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def describe_code() -> dict[str, str]:
    """Return the result of `hash_code`, and the versions of gpt2, Python, JAX and other packages.

    Together, these determine a run's results, apart from options, data and devices.
    """
    packages = ("jax", "jaxlib", "flax", "optax", "numpy", "grain")
    return {
        "gpt2": __version__,
        "code": hash_code(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def describe_start(step: int) -> dict[str, Any]:
    """Return the record for environment.jsonl of a run that starts or continues after `step`.

    The record describes what results depend on, apart from options and data. It contains neither
    the host name nor environment variables, which may be private. `code` comes from `hash_code`.
    `clean` is True if no Python file differs from the git commit `commit`. Outside a git checkout,
    `clean` and `commit` are None.
    """
    import jax  # slow, and not needed to hash code

    # If gpt2 is installed inside another project, git would report the commit of that project.
    commit = None
    changed = None
    if git(SOURCE, "ls-files", "gpt2/__init__.py"):
        commit = git(SOURCE, "rev-parse", "HEAD")
        changed = git(SOURCE, "status", "--porcelain", "*.py")
    return {
        "step": step,
        "time": datetime.now(UTC).isoformat(),
        "command": sys.argv,
        **describe_code(),
        "commit": commit,
        "clean": None if changed is None else not changed,
        "platform": platform.platform(),
        "device_kind": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
    }


def read_starts(workdir: Path) -> list[dict]:
    """Return the records in environment.jsonl that describe how the run's state was computed.

    Each record describes a start of the run, and the oldest is first. A start at step N discards
    the steps after N, so earlier records of starts at step N or later are left out.
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
