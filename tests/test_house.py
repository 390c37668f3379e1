"""The house keeps its size: growth is a decision, made by changing a number here."""

import ast
import re
from pathlib import Path

from gpt2.config import DEFAULTS, flatten

ROOT = Path(__file__).parents[1]


def lines(*patterns):
    files = {file for pattern in patterns for file in ROOT.glob(pattern)}
    return sum(len(file.read_text("utf-8").splitlines()) for file in files)


def pages():
    files = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    return "\n".join(file.read_text("utf-8") for file in files)


def test_the_project_stays_within_its_lines_and_words():
    assert lines("gpt2/**/*.py") <= 17_000
    assert lines("tests/**/*.py") <= 13_000
    assert len(pages().split()) <= 18_000


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


def test_pages_name_options_that_exist():
    named = set(re.findall(r"--config\.((?!a\.b|group\.)\w+\.[\w.]+)=", pages()))
    assert len(named) > 30
    assert named <= flatten(DEFAULTS.to_dict()).keys()


def test_messages_on_the_page_for_trouble_are_those_of_the_code():
    nodes = [n for file in ROOT.glob("gpt2/**/*.py") for n in ast.walk(ast.parse(file.read_text()))]
    constants = (node.value for node in nodes if isinstance(node, ast.Constant))
    texts = "\n".join(value for value in constants if isinstance(value, str))
    page = (ROOT / "docs/trouble.md").read_text("utf-8")
    quoted = re.findall("^### `(?:error|warning): (.*)`", page, re.M)
    assert len(quoted) > 6
    pieces = {piece.strip(" .") for message in quoted for piece in message.split("…")}
    assert not {piece for piece in pieces if piece not in texts}
