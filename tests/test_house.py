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


def test_pages_name_options_that_exist():
    named = set(re.findall(r"--config\.((?!a\.b|group\.)\w+\.[\w.]+)=", pages()))
    assert len(named) > 30
    assert named <= flatten(DEFAULTS.to_dict()).keys()


def test_messages_on_the_page_for_trouble_are_those_of_the_code():
    nodes = [
        n
        for file in ROOT.glob("gpt2/**/*.py")
        for n in ast.walk(ast.parse(file.read_text()))
    ]
    constants = (node.value for node in nodes if isinstance(node, ast.Constant))
    texts = "\n".join(value for value in constants if isinstance(value, str))
    page = (ROOT / "docs/trouble.md").read_text("utf-8")
    quoted = re.findall("^### `(?:error|warning): (.*)`", page, re.M)
    assert len(quoted) > 6
    pieces = {piece.strip(" .") for message in quoted for piece in message.split("…")}
    assert not {piece for piece in pieces if piece not in texts}
