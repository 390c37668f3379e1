"""Whether a run can continue: its options, texts, checkpoints and lock."""

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from gpt2.config import DataConfig
from gpt2.data import prepare_dataset
from gpt2.data.tokenizer import CharTokenizer
from gpt2.errors import UserError
from gpt2.telemetry.metrics import MetricsFile
from gpt2.training import workdir as run_files
from gpt2.utils import code, files
from gpt2.utils.code import hash_code, read_starts
from tests.helpers import TINY, make_repository, run, succeed
from tests.training.workdirs import make_config, write_run


def test_a_finished_run_that_lost_its_checkpoints_keeps_its_metrics(tmp_path):
    workdir = write_run(tmp_path, make_config())
    run_files.check_options(workdir, make_config())
    (workdir / "samples.txt").touch()
    with pytest.raises(UserError, match="without checkpoints"):
        run_files.check_options(workdir, make_config())


@pytest.mark.parametrize("content", ["", "{}", "[" * 10**5])
@pytest.mark.parametrize("name", ["data.json", "tokenizer.json"])
def test_a_damaged_file_next_to_the_checkpoints_is_written_again(
    tmp_path, capsys, monkeypatch, name, content
):
    workdir = tmp_path / "run"
    monkeypatch.setenv("GPT2_DATA_DIR", str(tmp_path / "data"))
    prepared = prepare_dataset(DataConfig(**data_at(tmp_path / "texts")))
    monkeypatch.setattr(run_files, "lock", lambda *_: workdir.mkdir(exist_ok=True))
    run_files.begin(workdir, make_config(), prepared, 0)
    (workdir / "checkpoints" / "2").mkdir(parents=True)
    whole = (workdir / name).read_bytes()
    (workdir / name).write_text(content)
    run_files.check_data(workdir, prepared)
    warning = capsys.readouterr().err
    warns = "data.json is missing or damaged" in warning
    assert warns == (name == "data.json")
    run_files.begin(workdir, make_config(), prepared, 2)
    assert (workdir / name).read_bytes() == whole


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ("optim.name=lion", "", "optim.name=lion, not adamw"),
        (
            "",
            "optim.beta1=0.8 optim.weight_decay=0.2",
            "beta1=0.9, not 0.8; optim.weight_d",
        ),
        ("seed=1", "", "seed=1, not 0"),
        ("data.batch_size=4", "", "data.batch_size=4, not"),
        ("loss.z_loss=0.1", "", "loss.z_loss=0.1, not 0.0"),
        ("", "model.num_layers=2", "model.num_layers=1, not 2"),
        ("", "model.vocab_size=51", "model.vocab_size=50, not 51"),
        ("", "model.vocab_size=0", ""),  # The data are not prepared yet.
        (
            "model.dropout=0.1",  # Each micro-batch has its own masks.
            "model.dropout=0.1 train.accumulate_steps=2",
            "train.accumulate_steps=1, not 2",
        ),
        (
            "model.stochastic_depth=0.1",
            "model.stochastic_depth=0.1 train.accumulate_steps=2",
            "train.accumulate_steps=1, not 2",
        ),
        ("", "train.num_steps=9 parallel.fsdp=2 logging.tensorboard=False", ""),
        ("", "model.attention=plain train.accumulate_steps=2", ""),
    ],
)
def test_a_run_continues_unless_what_it_trains_would_change(
    tmp_path, before, now, message
):
    workdir = write_run(tmp_path, make_config(before))
    config = make_config(now)
    if not message:
        run_files.check_options(workdir, config)
        return
    with pytest.raises(UserError, match=re.escape(message)):
        run_files.check_options(workdir, config)


def test_a_folder_of_other_files_is_refused_unless_they_are_prepared_corpora(tmp_path):
    workdir = tmp_path / "run"
    data_dir = workdir / "data"
    config = make_config(data_dir=str(data_dir))
    data_dir.mkdir(parents=True)
    (workdir / ".lock").touch()
    run_files.check_options(workdir, config)
    (workdir / "thesis.tex").touch()
    with pytest.raises(UserError, match="contains thesis"):
        run_files.check_options(workdir, config)


def test_a_run_is_finished_at_its_last_step_with_samples(tmp_path, capsys):
    config = make_config("train.num_steps=4")
    workdir = write_run(tmp_path / "run", config, checkpoints=(2, 4))
    assert not run_files.is_finished(workdir, config, start=4)
    (workdir / "samples.txt").touch()
    assert run_files.is_finished(workdir, config, start=4)
    # The last checkpoint is damaged, or more steps are left.
    assert not run_files.is_finished(workdir, config, start=2)
    longer = make_config("train.num_steps=6")
    assert not run_files.is_finished(workdir, longer, start=4)
    run_files.begin(workdir, longer, DATA, 4)
    assert "continues with train.num_steps=6, not 4" in capsys.readouterr().out


DOCUMENTS = [f"document {i} " * (10 + i % 3) for i in range(30)]


def data_at(directory, documents=DOCUMENTS, **options):
    """Write a corpus of several documents, and return the options of it."""
    directory.mkdir()
    for number, text in enumerate(documents):
        (directory / f"{number:02}.txt").write_text(text)
    corpus = f"text:{directory}/*.txt"
    return dict(corpus=corpus, tokenizer="byte", val_fraction=0.2) | options


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """Return a function that begins a run on data, and one that continues it on other data."""
    monkeypatch.setenv("GPT2_DATA_DIR", str(tmp_path / "data"))

    def begin(data):
        config = make_config(**data)
        run_files.begin(tmp_path / "run", config, prepare_dataset(config.data), 0)

    def resume(data):
        config = make_config(**data)
        run_files.check_options(tmp_path / "run", config)
        run_files.check_data(tmp_path / "run", prepare_dataset(config.data))

    return begin, resume


def test_a_run_continues_on_its_text_wherever_that_lies(tmp_path, begun):
    begin, resume = begun
    begin(data_at(tmp_path / "here"))
    resume(data_at(tmp_path / "there"))
    first, *rest = DOCUMENTS
    altered = data_at(tmp_path / "altered", [first.replace("0", "#", 1), *rest])
    with pytest.raises(UserError, match="is not the one with which"):
        resume(altered)
    reordered = data_at(tmp_path / "reordered", [*rest, first])
    with pytest.raises(UserError, match="is not the one with which"):
        resume(reordered)
    other = reordered | {"corpus": "pystdlib"}
    with pytest.raises(UserError, match=r"run with data\.corpus=.*, not pystdlib"):
        resume(other)


def test_a_mixture_continues_with_its_weights_wherever_its_texts_lie(tmp_path, begun):
    begin, resume = begun
    here, there = (data_at(tmp_path / name)["corpus"] for name in ("here", "there"))
    data = data_at(tmp_path / "unused")
    begin(data | {"corpus": f"3*{here}+1*synthetic"})
    resume(data | {"corpus": f"3*{there}+1*synthetic"})
    with pytest.raises(UserError, match=r"run with data\.corpus="):
        resume(data | {"corpus": f"1*{there}+1*synthetic"})


def test_a_run_continues_with_its_tokenizer_wherever_that_lies(tmp_path, begun):
    begin, resume = begun
    characters = sorted(set("".join(DOCUMENTS)))
    for name, end in (("first", ""), ("moved", ""), ("other", "~")):
        tokenizer = CharTokenizer("".join(characters) + end, True)
        tokenizer.save(tmp_path / f"{name}.json")
    data = data_at(tmp_path / "here", tokenizer=f"{tmp_path}/first.json")
    begin(data)
    resume(data | {"tokenizer": f"{tmp_path}/moved.json"})
    with pytest.raises(UserError, match="is not the one with which"):
        resume(data | {"tokenizer": f"{tmp_path}/other.json"})


DATA = SimpleNamespace(describe=dict, tokenizer=CharTokenizer("ab", True))


@pytest.mark.thorough
def test_a_second_process_in_a_workdir_is_refused_and_changes_nothing(tmp_path):
    def contents():
        found = {}
        for path in tmp_path.rglob("*"):
            found[path] = path.read_bytes() if path.is_file() else None
        return found

    workdir = tmp_path / "run"
    options = [*TINY, "--config.data.corpus=synthetic", "--config.train.num_steps=2"]
    succeed(workdir, *options)
    run_files.lock(workdir, start=2)  # until this process ends
    before = contents()
    code, _, stderr = run(workdir, *options, "--config.train.num_steps=4")
    assert code == 2
    assert "Another process is training in" in stderr
    assert contents() == before


def test_a_file_system_without_locks_is_trained_on(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    run_files.lock(tmp_path, start=0)
    monkeypatch.setattr(run_files, "newest_whole_step", lambda workdir, after: (4, []))
    # Another process has begun and ended in the meantime.
    with pytest.raises(UserError, match="Another process"):
        run_files.lock(tmp_path, start=0)


def test_a_start_has_its_line_and_a_continued_run_another(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--config.seed=3"])
    monkeypatch.setattr(code, "SOURCE", tmp_path)  # which is no checkout of git
    monkeypatch.setattr(run_files, "lock", lambda *_: None)
    run_files.begin(tmp_path, make_config(), DATA, 0)
    path = tmp_path / "environment.jsonl"
    path.write_bytes(path.read_bytes()[:-1])  # an editor has removed the line break
    run_files.begin(tmp_path, make_config(), DATA, 20)
    new, continued = read_starts(tmp_path)
    assert new["step"] == 0
    assert continued["step"] == 20
    assert continued["code"] == new["code"]
    began = datetime.fromisoformat(new["time"])
    assert timedelta() <= datetime.now(UTC) - began < timedelta(hours=1)
    assert new["command"] == ["train.py", "--config.seed=3"]
    assert new["jax"] == version("jax")
    assert new["commit"] is None
    assert new["devices"] == jax.device_count()
    monkeypatch.setattr(code, "hash_code", lambda: "c0de")
    # The checkpoint of step 20 was damaged.
    run_files.begin(tmp_path, make_config(), DATA, 10)
    first, last = read_starts(tmp_path)
    assert first == new
    assert last["step"] == 10
    assert last["code"] == "c0de"


def test_metrics_of_checkpoints_that_are_gone_are_set_aside(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "lock", lambda *_: None)
    with contextlib.closing(MetricsFile(tmp_path / "metrics.jsonl")) as writer:
        writer.write(5, {"train/loss": 1.0})
    for _ in range(2):  # the second time there are none
        run_files.begin(tmp_path, make_config(), DATA, 0)
        assert (tmp_path / "metrics.jsonl").read_text() == ""
    (aside,) = (tmp_path / "damaged").iterdir()
    assert json.loads(aside.read_text())["step"] == 5


PACKAGES = (
    "config data model ops optim parallel training utils"  # whose code changes results
)


@pytest.mark.parametrize(
    ("file", "text", "same"),
    [
        ("gpt2/model/block.py", "def f(x): # x\n  return (\n2 * x)", True),
        ("gpt2/model/block.py", "def f(x):\n    return 3 * x", False),
        ("gpt2/model/block.py", "def f(x):\n    return 2 *", False),  # unfinished
        *((f"gpt2/{name}/mine.py", "", False) for name in PACKAGES.split()),
        ("gpt2/model/.#block.py", "", True),
        ("gpt2/evals/tasks.py", "x = 1", True),
        ("gpt2/cli.py", "x = 1", True),
        ("train.py", "x = 1", False),
    ],
)
def test_the_hash_of_the_code_is_of_what_a_run_computes(tmp_path, file, text, same):
    block = tmp_path / "gpt2/model/block.py"
    for path in (block, tmp_path / file):
        path.parent.mkdir(parents=True, exist_ok=True)
    block.write_text("def f(x):\n    return 2 * x\n")
    before = hash_code(tmp_path)
    (tmp_path / file).write_text(text)
    after = hash_code(tmp_path)
    assert (after == before) == same


@pytest.mark.skipif(not shutil.which("git"), reason="git is missing")
@pytest.mark.parametrize(
    ("changed", "clean"),
    [("gpt2/new.py", False), ("ignored/new.py", True)],
)
def test_a_checkout_is_clean_until_its_code_changes(
    tmp_path, monkeypatch, changed, clean
):
    def commit_and_clean():
        line = code.describe_start(0)
        return line["commit"], line["clean"]

    for project in (tmp_path, tmp_path / "ignored"):
        (project / "gpt2").mkdir(parents=True)
        (project / "gpt2" / "__init__.py").touch()
    (tmp_path / ".gitignore").write_text("ignored/\n")
    make_repository(tmp_path, ".gitignore", "ignored/\n# of another branch")
    command = ["git", "rev-parse", "HEAD"]
    commit = subprocess.check_output(command, cwd=tmp_path, text=True).strip()
    monkeypatch.setattr(code, "SOURCE", tmp_path)
    assert commit_and_clean() == (commit, True)
    (tmp_path / changed).write_text("x = 1")
    assert commit_and_clean() == (commit, clean)
    # Code that is installed below a checkout does not belong to it.
    monkeypatch.setattr(code, "SOURCE", tmp_path / "ignored")
    assert commit_and_clean() == (None, None)


def test_a_corpus_that_does_not_exist_is_named_before_the_options_of_the_run(tmp_path):
    workdir = write_run(tmp_path, make_config())
    with pytest.raises(UserError, match=r"data\.corpus='txt:a' is not a corpus"):
        run_files.check_options(workdir, make_config(corpus="txt:a"))


@pytest.mark.parametrize("folder", ["/proc", "/sys"])
def test_a_folder_that_cannot_be_written_is_refused_before_data_are_read(folder):
    workdir = Path(folder) / "nope"
    with pytest.raises(UserError, match=rf"--workdir={workdir} cannot be written"):
        run_files.check_options(workdir, make_config())


@pytest.mark.parametrize("mark", ["*", "?", "[", "\\", os.fsdecode(b"\xe9")])
def test_a_folder_whose_checkpoints_could_not_be_read_is_refused(tmp_path, mark):
    workdir = tmp_path / f"{mark}s" / "run"
    shown = mark.encode("ascii", "backslashreplace").decode()
    run_files.check_options(tmp_path / "#1 |{50%}", make_config())
    with pytest.raises(UserError, match=re.escape(f"the path contains {shown}.")):
        run_files.check_options(workdir, make_config())
