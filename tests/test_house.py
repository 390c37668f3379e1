"""The house keeps its size: growth is a decision, made by changing a number here."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]


def lines(*patterns):
    files = {file for pattern in patterns for file in ROOT.glob(pattern)}
    return sum(len(file.read_text("utf-8").splitlines()) for file in files)


def test_the_project_stays_within_its_lines_and_words():
    assert lines("gpt2/**/*.py") <= 17_000
    assert lines("tests/**/*.py") <= 13_000
    pages = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    assert sum(len(page.read_text("utf-8").split()) for page in pages) <= 18_000


def test_train_tells_the_run_in_two_hundred_lines():
    assert lines("train.py") <= 200
    nodes = ast.walk(ast.parse((ROOT / "train.py").read_text()))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    modules = {
        f"gpt2.{alias.name}" if node.module == "gpt2" else node.module
        for node in imports
        for alias in node.names
        if (node.module or "").startswith("gpt2")
    }
    assert len(modules) <= 14
