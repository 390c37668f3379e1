"""Preparing goes on where it was cut, drops what came before, and says what it has made."""

import errno
import re
from dataclasses import replace

import numpy as np
import pytest

from gpt2.config import DataConfig
from gpt2.data import prepare, tokens
from gpt2.data.preparing import documents
from gpt2.errors import UserError
from gpt2.utils import files
from tests.forks import run_command
from tests.helpers import write_rows, write_words

BOOK = """
import os, signal
from pathlib import Path
from gpt2.data.preparing import documents

documents.SAVED_TOKENS = 5000
documents.PART_CHARACTERS = 500
documents.AHEAD = 0
os.cpu_count = lambda: 2

def pages():
    edition = Path("edition").read_text()
    for number in range(400):
        if Path(f"kill-{number}").exists():
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
    place = "--config.data.corpus=python:book:pages", "--config.data.tokenizer=byte"

    def run(data_dir, *options):
        where = f"--config.data.data_dir={data_dir}", "--config.data.val_fraction=0.2"
        return run_command("gpt2.data.prepare", *place, *where, *options, cwd=tmp_path)

    return run


def content_of(data_dir):
    """Returns the files of the one prepared corpus of a directory; nothing else lies there."""
    (folder,) = (path for path in data_dir.iterdir() if path.suffix != ".lock")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("unique", [True, False])
def test_a_preparation_that_is_killed_goes_on_and_ends_as_if_it_were_not(
    run, tmp_path, unique
):
    option = f"--config.data.unique={unique}"
    assert run("whole", option).code == 0
    for page in KILLS:
        (tmp_path / f"kill-{page}").touch()
    ends = [run("cut", option) for _ in KILLS]
    assert not list((tmp_path / "cut").glob("[!.]*"))
    ends.append(run("cut", option))
    assert [end.code for end in ends] == [-9] * len(KILLS) + [0]
    begun = [
        re.search("continuing after document ([0-9]+)", end.stdout) for end in ends
    ]
    places = [int(found[1]) if found else 0 for found in begun]
    assert (
        not any(places[:2]) and 60 < places[2] == places[3]
    )  # 20 pages are less than is saved
    assert all(page - place < 40 for page, place in zip(KILLS, places[1:], strict=True))
    assert content_of(tmp_path / "cut") == content_of(tmp_path / "whole")
    documents = re.findall(r"in (\d+) documents", ends[-1].stdout)
    assert sum(map(int, documents)) == (300 if unique else 400)


def test_a_preparation_begins_anew_if_the_text_is_another_one(run, tmp_path):
    (tmp_path / "kill-230").touch()
    assert run("cut").code == -9
    (tmp_path / "edition").write_text("2nd")
    shown = (
        "--inspect",
        "--config.data.packing=bos",
        "--config.model.context_length=999",
    )
    told, whole = (run(place, *shown).stdout for place in ("cut", "whole"))
    assert "continuing" not in told and whole.count("===== row") == 3
    assert len(re.findall(r"endoftext\|>2nd [0-9]+: the quick", whole)) > 3
    assert content_of(tmp_path / "cut") == content_of(tmp_path / "whole")


DAMAGE = {
    "cut": lambda data: data[: len(data) // 2],
    "flipped": lambda data: data[:1000] + bytes([data[1000] ^ 1]) + data[1001:],
    "gone": None,
}


@pytest.mark.parametrize("name", ["train-00000.bin", "tokenizer.json", "written.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_preparation_does_not_go_on_over_damage(tmp_path, monkeypatch, name, damage):
    monkeypatch.setattr(documents, "SAVED_TOKENS", 5000)
    write_words(tmp_path / "texts", 60, 700)
    places = dict(corpus=f"text:{tmp_path}/texts/*.txt", tokenizer="bpe:300")
    make = lambda name: prepare(DataConfig(**places, data_dir=str(tmp_path / name)))  # noqa: E731
    make("whole")
    save = documents.Progress.save
    saves = iter(range(10))

    def stop(self, directory):
        save(self, directory)
        if next(saves) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(documents.Progress, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            make("cut")
    (partial,) = (tmp_path / "cut").glob(".*.partial")
    content = (partial / name).read_bytes()
    (partial / name).unlink()
    if DAMAGE[damage]:
        (partial / name).write_bytes(DAMAGE[damage](content.ljust(2000)))
    make("cut")
    assert content_of(tmp_path / "cut") == content_of(tmp_path / "whole")


def test_what_a_kill_leaves_beside_what_is_counted_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "SAVED_TOKENS", 100_000)
    data = DataConfig(corpus="synthetic", tokenizer="byte")
    make = lambda name: prepare(replace(data, data_dir=str(tmp_path / name)))  # noqa: E731
    whole = make("whole")
    save = documents.Progress.save

    def stop(self, directory):
        save(self, directory)
        for name in ("train-00001.bin", "prepared.json.tmp"):
            assert not (directory / name).exists()
            (directory / name).write_bytes(b"some")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(documents.Progress, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            make("cut")
    make("cut")
    assert content_of(tmp_path / "cut") == content_of(tmp_path / "whole")
    (_, tokens) = whole.parts[""]
    assert len(tokens.splits["train"].shards) > 9


def test_only_counted_shards_are_digested(tmp_path):
    progress = documents.Progress(
        {"train": tokens.Split(), "validation": tokens.Split()}
    )
    writer = tokens.TokenWriter(tmp_path, 256, progress.splits)
    (tmp_path / "validation-00000.bin").write_bytes(b"some")  # which a kill has left
    for counted in (["train-00000.bin"], ["train-00000.bin", "validation-00000.bin"]):
        split = counted[-1].partition("-")[0]
        writer.append(split, np.arange(9))
        writer.close()
        progress.save(tmp_path)
        assert list(progress.digests) == counted
        assert not files.find_damage(tmp_path, progress.digests)


def test_a_full_disk_is_told_and_room_lets_it_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "SAVED_TOKENS", 2**17)
    data = DataConfig(corpus="synthetic", tokenizer="byte")
    make = lambda name: prepare(replace(data, data_dir=str(tmp_path / name)))  # noqa: E731
    append = tokens.TokenWriter.append
    calls = iter(range(10**6))

    def fill(self, *arguments):
        if next(calls) == 2000:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, *arguments)

    monkeypatch.setattr(tokens.TokenWriter, "append", fill)
    with pytest.raises(
        UserError, match=r"No space left on device\)\. Make room, and repeat"
    ):
        make("full")
    make("full")
    assert next(calls) < 2000 + 2200  # of 4000 documents
    make("whole")
    assert content_of(tmp_path / "full") == content_of(tmp_path / "whole")


def test_statistics_are_counts_of_what_is_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "CHUNK", 50)
    texts = ["é" * number for number in (5, 31, 32, 99, 5, 7)]  # two bytes each
    path = tmp_path / "texts.jsonl"
    write_rows(path, [{"text": text} for text in texts])
    options = dict(corpus=f"jsonl:{path}", tokenizer="byte", val_fraction=0.01)
    options |= dict(unique=True, data_dir=str(tmp_path / "data"))
    made = prepare(DataConfig(**options))
    counts = made.describe()["splits"].values()
    sums = {
        name: sum(split[f"num_{name}"] for split in counts)
        for name in ("tokens", "bytes", "documents", "lost")
    }
    num_bytes = 2 * sum((5, 31, 32, 99, 7))  # one came before
    assert sums == dict(tokens=num_bytes + 5, bytes=num_bytes, documents=5, lost=0)
