"""Every start of a run leaves a line that says with what the run was made."""

import json
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from importlib.metadata import version

import jax
import pytest

import gpt2
from gpt2.training import environment

needs_git = pytest.mark.skipif(not shutil.which("git"), reason="git is missing")


def starts_of(workdir):
    return [json.loads(line) for line in (workdir / "environment.jsonl").read_text().splitlines()]


def test_a_start_has_its_line_and_a_continued_run_another(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--config.seed=3"])
    monkeypatch.setattr(environment, "_SOURCE", tmp_path)  # no checkout; see below for those
    environment.record_start(tmp_path, step=0, batch_shards=4)
    environment.record_start(tmp_path, step=20, batch_shards=4)
    new, continued = starts_of(tmp_path)
    assert (new["step"], continued["step"]) == (0, 20)
    began = datetime.fromisoformat(new.pop("time"))
    assert timedelta(0) <= datetime.now(UTC) - began < timedelta(minutes=1)
    assert isinstance(new.pop("platform"), str)
    libraries = {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")}
    assert new == libraries | {
        "step": 0,
        "command": ["train.py", "--config.seed=3"],
        "gpt2": gpt2.__version__,
        "commit": None,
        "clean": None,
        "python": ".".join(map(str, sys.version_info[:3])),
        "device_kind": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processes": 1,
        "batch_shards": 4,
    }


def test_a_torn_last_line_gives_way_to_a_whole_one(tmp_path):
    (tmp_path / "environment.jsonl").write_text('{"step": 0}\n{"step": 20, "ti')
    environment.record_start(tmp_path, step=20, batch_shards=4)
    assert [line["step"] for line in starts_of(tmp_path)] == [0, 20]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout of one commit, which stands in for that of gpt2."""
    source = tmp_path / "checkout"
    (source / "gpt2").mkdir(parents=True)
    (source / "gpt2" / "__init__.py").write_text("")
    (source / ".gitignore").write_text("ignored/\n")
    author = ["-c", "user.name=A", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "All"]):
        subprocess.run(["git", *command], cwd=source, check=True)
    monkeypatch.setattr(environment, "_SOURCE", source)
    return source


def commit_and_clean():
    line = environment.describe_start(0)
    return line["commit"], line["clean"]


@needs_git
@pytest.mark.parametrize(
    ("changed", "clean"),
    [
        ("gpt2/__init__.py", False),
        ("gpt2/new.py", False),
        ("ignored/new.py", True),
        ("runs/first/config.json", True),
    ],
)
def test_a_checkout_is_clean_until_its_code_changes(checkout, changed, clean):
    head = ["git", "rev-parse", "HEAD"]
    commit = subprocess.check_output(head, cwd=checkout, text=True).strip()
    assert commit_and_clean() == (commit, True)
    (checkout / changed).parent.mkdir(parents=True, exist_ok=True)
    (checkout / changed).write_text("x = 1")
    assert commit_and_clean() == (commit, clean)


@needs_git
def test_code_installed_below_a_checkout_is_not_taken_for_it(checkout, monkeypatch):
    installed = checkout / "ignored" / "site-packages"
    (installed / "gpt2").mkdir(parents=True)
    (installed / "gpt2" / "__init__.py").write_text("")
    monkeypatch.setattr(environment, "_SOURCE", installed)
    assert commit_and_clean() == (None, None)


@needs_git
def test_a_git_hook_does_not_name_another_checkout(checkout, tmp_path, monkeypatch):
    expected = commit_and_clean()
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    assert commit_and_clean() == expected


def test_outside_a_checkout_or_without_git_the_commit_is_unknown(tmp_path, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(environment, "_SOURCE", tmp_path)
        assert commit_and_clean() == (None, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_and_clean() == (None, None)


@needs_git
def test_a_git_that_hangs_is_given_up(checkout, monkeypatch):
    monkeypatch.setattr(environment, "_GIT_SECONDS", 0)
    assert commit_and_clean() == (None, None)
