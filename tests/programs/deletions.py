"""Delete each ingredient with its options, and check that the rest works without it.

    python -m tests.programs.deletions [FILE ...]

The program deletes the ingredients of the named files, for example `experts`, or each ingredient
and each term of the loss in turn. It takes about a minute for each. Tests of code that needs an
ingredient, such as a family of Hugging Face models, would be deleted with the ingredient. They are
not run.
"""

import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from gpt2.config.options import OPTIONS
from gpt2.model.ingredients import INGREDIENTS
from gpt2.training.losses import LOSS_TERMS
from tests.helpers import copy_project

CHECKS = (
    ["-m", "pytest", "-n0", "tests/model/test_switches.py", "-k", "llama or modded"],
    ["-c", "from gpt2.training import Program"],
)


def delete(folder, kind):
    """Delete the file of a class, and its options."""
    file = Path(*kind.__module__.split(".")).with_suffix(".py")
    (folder / file).unlink()
    if kind in LOSS_TERMS:
        # Ingredients are found by their files, but the core names the terms of the loss in a tuple.
        # In the tuple, `*()` adds nothing, so the other terms remain.
        core = folder / file.parent / "next_token.py"
        text = core.read_text()
        text = text.replace(f"from {kind.__module__} import {kind.__name__}\n", "")
        core.write_text(re.sub(rf"\b{kind.__name__}\b", "*()", text))
    group = "loss" if kind in LOSS_TERMS else "model"
    delete_options(folder / "configs/default.py", f"{group}.{kind.option}", file.stem)


def delete_options(path, name, value):
    """Delete an option and options that need it, or one of its values, from configs/default.py."""
    text = path.read_text()
    if value in OPTIONS[name].choices:
        start, choice, end = text.partition(f'"{value}", ')
        assert choice
        path.write_text(start + end)
        return
    names = {name}
    for other, option in OPTIONS.items():
        if option.needs.partition("=")[0] == name:
            names.add(other)
    lines = text.splitlines(keepends=True)
    for group in ast.parse(text).body:
        if not isinstance(group, ast.ClassDef):
            continue
        for field in group.body:
            if not isinstance(field, ast.AnnAssign):
                continue
            option = f"{group.name.lower()}.{field.target.id}"
            if option in names:
                names.remove(option)
                size = field.end_lineno - field.lineno + 1
                lines[field.lineno - 1 : field.end_lineno] = [""] * size
    assert not names
    path.write_text("".join(lines))


def works_without(kind):
    """Return whether all checks pass in a copy without an ingredient. Print the first failure."""
    with tempfile.TemporaryDirectory() as folder:
        copy_project(Path(folder))
        delete(Path(folder), kind)
        for check in CHECKS:
            done = subprocess.run(
                [sys.executable, *check],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": folder},
                capture_output=True,
                text=True,
            )
            if done.returncode:
                print(done.stdout[-1500:], done.stderr[-1500:])
                return False
    return True


def main(files):
    kinds = {}
    for kind in (*INGREDIENTS, *LOSS_TERMS):
        kinds[kind.__module__.rpartition(".")[2]] = kind
    failed = []
    for file in files or kinds:
        works = works_without(kinds[file])
        print("fine " if works else "WRONG", file, flush=True)
        if not works:
            failed.append(file)
    if failed:
        raise SystemExit(f"The rest of the code needs {', '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
