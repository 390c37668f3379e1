"""Preparing goes on where it was cut, drops what came before, and says what it has made."""

import errno
import itertools
import re
from collections import Counter

import pytest

from gpt2.config import DataConfig
from gpt2.data import prepare_dataset, tokens
from gpt2.data.preparing import prepared_folder, text_corpus
from gpt2.errors import UserError
from tests.forks import run_command
from tests.helpers import DAMAGES, write_rows, write_words

BOOK = """
import itertools, os, signal
from pathlib import Path
from gpt2.data.preparing import documents, text_corpus

text_corpus.SAVED_TOKENS = 5000
text_corpus.AHEAD = 0
documents.PART_CHARACTERS = 500
os.cpu_count = lambda: 2

readings = itertools.count()  # two measure the documents, the third encodes them

def pages():
    edition = Path("edition").read_text()
    is_encoding = next(readings) == 2
    for number in range(400):
        if is_encoding and Path(f"kill-{number}").exists():
            Path(f"kill-{number}").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        number %= 300
        yield f"{edition} {number}: " + "the quick brown fox " * (number % 90)
"""
KILLS = (20, 90, 91, 230, 290)


@pytest.fixture
def run(tmp_path):
    """Prepares BOOK by the command, in a process of its own, into a directory of `tmp_path`."""
    (tmp_path / "book.py").write_text(BOOK)
    (tmp_path / "edition").write_text("first")

    def run(data_dir, *options):
        return run_command(
            "gpt2.data.prepare",
            "--config.data.corpus=python:book:pages",
            "--config.data.tokenizer=byte",
            "--config.data.val_fraction=0.2",
            f"--config.data.data_dir={data_dir}",
            *options,
            cwd=tmp_path,
        )

    return run


def content_of(data_dir):
    """Returns the files of the one prepared corpus of a directory; nothing else lies there."""
    (folder,) = (path for path in data_dir.iterdir() if path.suffix != ".lock")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_preparation_that_is_killed_goes_on_and_ends_as_if_it_were_not(run, tmp_path):
    option = "--config.data.unique=True"
    assert run("whole", option).code == 0
    for page in KILLS:
        (tmp_path / f"kill-{page}").touch()
    starts = []
    for page in [*KILLS, None]:
        end = run("cut", option)
        match = re.search("continuing after document ([0-9]+)", end.stdout)
        starts.append(int(match[1]) if match else 0)
        assert end.code == (0 if page is None else -9)
        is_ready = any((tmp_path / "cut").glob("[!.]*"))
        assert is_ready == (page is None)
    assert starts[:2] == [0, 0]  # 20 pages are less than is saved
    assert starts[2] > 60
    assert starts[2] == starts[3]
    for page, start in zip(KILLS, starts[1:], strict=True):
        assert page - start < 40
    assert content_of(tmp_path / "cut") == content_of(tmp_path / "whole")
    documents = re.findall(r"in (\d+) documents", end.stdout)
    assert sum(map(int, documents)) == 300


def test_a_preparation_begins_anew_if_the_text_is_another_one(run, tmp_path):
    (tmp_path / "kill-230").touch()
    assert run("cut").code == -9
    (tmp_path / "edition").write_text("2nd")
    options = ["--config.data.packing=bos", "--config.model.context_length=999"]
    assert "continuing" not in run("cut").stdout
    whole = run("whole", "--inspect", *options).stdout
    assert whole.count("===== row") == 3
    assert len(re.findall(r"endoftext\|>2nd [0-9]+: the quick", whole)) > 3
    assert content_of(tmp_path / "cut") == content_of(tmp_path / "whole")


@pytest.fixture
def prepare_into(tmp_path):
    """Prepares a corpus into a directory of `tmp_path`."""

    def prepare_into(name, corpus="synthetic", tokenizer="byte"):
        data_dir = str(tmp_path / name)
        return prepare_dataset(
            DataConfig(corpus=corpus, tokenizer=tokenizer, data_dir=data_dir)
        )

    return prepare_into


def stop_at_save(monkeypatch, number):
    """Interrupts a preparation once, after a number of saves."""
    save = text_corpus.Progress.save
    saves = itertools.count(1)

    def stop(*arguments):
        save(*arguments)
        if next(saves) == number:
            raise KeyboardInterrupt

    monkeypatch.setattr(text_corpus.Progress, "save", stop)


@pytest.mark.parametrize("name", ["train-00000.bin", "tokenizer.json", "written.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_preparation_does_not_go_on_over_damage(
    tmp_path, monkeypatch, prepare_into, name, damage
):
    monkeypatch.setattr(text_corpus, "SAVED_TOKENS", 5000)
    options = f"text:{write_words(tmp_path / 'texts', 60, 700)}", "bpe:300"
    prepare_into("whole", *options)
    stop_at_save(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        prepare_into("cut", *options)
    (partial,) = (tmp_path / "cut").glob(".*.partial")
    damage(partial / name)
    prepare_into("cut", *options)
    assert content_of(tmp_path / "cut") == content_of(tmp_path / "whole")


@pytest.mark.thorough
def test_what_a_kill_leaves_beside_what_is_counted_goes(
    tmp_path, monkeypatch, prepare_into
):
    monkeypatch.setattr(text_corpus, "SAVED_TOKENS", 100_000)
    whole = prepare_into("whole")
    stop_at_save(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        prepare_into("cut")
    (partial,) = (tmp_path / "cut").glob(".*.partial")
    for name in ("train-00001.bin", "prepared.json.tmp"):
        assert not (partial / name).exists()
        (partial / name).write_bytes(b"some")
    prepare_into("cut")
    assert content_of(tmp_path / "cut") == content_of(tmp_path / "whole")
    (_, tokens) = whole.parts[""]
    assert len(tokens.splits["train"].shards) > 9


def test_a_full_disk_is_told_and_room_lets_it_go_on(
    tmp_path, monkeypatch, prepare_into
):
    monkeypatch.setattr(text_corpus, "SAVED_TOKENS", 2**17)
    append = tokens.TokenWriter.append
    calls = itertools.count()

    def fill(*arguments):
        if next(calls) == 2000:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(*arguments)

    monkeypatch.setattr(tokens.TokenWriter, "append", fill)
    message = r"No space left on device\)\. Free some disk space, and repeat"
    with pytest.raises(UserError, match=message):
        prepare_into("full")
    prepare_into("full")
    assert next(calls) < 2000 + 2200  # of 4000 documents
    prepare_into("whole")
    assert content_of(tmp_path / "full") == content_of(tmp_path / "whole")


def test_what_a_reader_cannot_read_is_no_full_disk(tmp_path):
    missing = FileNotFoundError(errno.ENOENT, "No such file", "mails/gone.eml")
    lost = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
    forbidden = PermissionError(errno.EACCES, "Denied", str(tmp_path / "part.bin"))
    errors = [missing, lost, forbidden]
    told = [prepared_folder._prevents_writing(error, tmp_path) for error in errors]
    assert told == [False, False, True]


def test_statistics_are_counts_of_what_is_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "CHUNK", 50)
    sizes = (5, 31, 32, 99, 5, 7)
    path = tmp_path / "texts.jsonl"
    write_rows(path, [{"text": "é" * size} for size in sizes])
    data = DataConfig(
        corpus=f"jsonl:{path}",
        tokenizer="byte",
        val_fraction=0.01,
        unique=True,
        data_dir=str(tmp_path / "data"),
    )
    sums = Counter()
    for split in prepare_dataset(data).describe()["splits"].values():
        sums.update(split)
    num_bytes = 2 * (sum(sizes) - 5)  # one came before
    assert sums["num_tokens"] == num_bytes + 5
    assert sums["num_bytes"] == num_bytes
    assert sums["num_documents"] == 5
    assert sums["num_lost"] == 0
