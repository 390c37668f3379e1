"""Of which code a run is: a hash of what decides its figures, kept with each of its starts."""

import ast
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2]  # where train.py, gpt2/ and configs/ lie
# Of gpt2/, what decides no figure of a run: tools, and what only tells of it.
_ASIDE = (
    *("ablate", "benchmark", "evals", "plan", "profile", "telemetry"),
    *("cli.py", "compare.py", "errors.py", "generate.py"),
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def hash_code(source: Path = SOURCE) -> str:
    """Returns a hash of the code in `source` that decides what a run computes, as it lies on disk.

    Comments, docstrings and the breaking of lines do not count, the version of Python does.
    """
    package = source / "gpt2"
    digest = hashlib.sha256()
    found = package.rglob("[!.]*.py")  # editors keep files of their own, with a dot
    paths = [path for path in found if path.relative_to(package).parts[0] not in _ASIDE]
    for path in sorted(
        [*paths, *source.glob("train.py"), *package.glob("evals/validation.py")]
    ):
        digest.update(
            f"{path.relative_to(source)}\n{_bare(path.read_bytes())}\n".encode()
        )
    return digest.hexdigest()[:12]


@functools.cache  # a sweep asks before each run
def _bare(text: bytes) -> str:
    """Returns a file's syntax tree without docstrings and numbers of lines."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # somebody is writing it
        return repr(text)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False):
            del node.body[0]
    return ast.dump(tree)


def read_starts(workdir: Path) -> list[dict[str, Any]]:
    """Returns the lines of environment.jsonl whose steps the run still has, oldest first.

    A start from an earlier step does away with the steps of those before it.
    """
    path = workdir / "environment.jsonl"
    starts = list[dict[str, Any]]()
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        start = {"code": "unknown"} | json.loads(line)  # of earlier versions
        starts = [each for each in starts if each["step"] < start["step"]] + [start]
    return starts
