"""Preparing goes on where it was cut, drops what came before, and says what it has made."""

import errno
import json
import re
import shutil
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from gpt2.config import DataConfig
from gpt2.data import dataset, splits, tokens
from gpt2.data.corpus import open_corpus
from gpt2.data.loader import TrainLoader, ValidationLoader
from gpt2.errors import UserError
from gpt2.training import Batches
from tests.forks import run_command

BOOK = """
import os, signal
from pathlib import Path
from gpt2.data import splits

splits.SAVED_TOKENS, splits.PART_CHARACTERS, splits.AHEAD, os.cpu_count = 5000, 500, 0, lambda: 2

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
    begun = [re.search("going on after document ([0-9]+)", end.stdout) for end in ends]
    places = [int(found[1]) if found else 0 for found in begun]
    assert (
        not any(places[:2]) and 60 < places[2] == places[3]
    )  # 20 pages are less than is saved
    assert all(page - place < 40 for page, place in zip(KILLS, places[1:], strict=True))
    assert content_of(tmp_path / "cut") == content_of(tmp_path / "whole")
    dropped = json.loads(content_of(tmp_path / "cut")["prepared.json"])["num_dropped"]
    assert dropped == (100 if unique else 0)


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
    assert "going on" not in told and whole.count("===== row") == 3
    assert len(re.findall("^-----\n2nd [0-9]+: the quick", whole, re.M)) > 3
    assert content_of(tmp_path / "cut") == content_of(tmp_path / "whole")


def test_a_full_disk_is_told_in_advance_or_once_and_room_lets_it_go_on(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(splits, "SAVED_TOKENS", 2**17)
    data = DataConfig(corpus="synthetic", tokenizer="byte")
    make = lambda name: dataset.prepare(replace(data, data_dir=str(tmp_path / name)))  # noqa: E731
    append, calls = tokens.TokenWriter.append, iter(range(10**6))

    def fill(self, *arguments):
        if next(calls) == 2000:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, *arguments)

    monkeypatch.setattr(tokens.TokenWriter, "append", fill)
    with pytest.raises(
        UserError, match=r"No space left on device\)\. Make room, and repeat"
    ):
        make("full")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
        with pytest.raises(
            UserError, match="more bytes are needed, and 1,000,000 are free"
        ):
            make("full")
    make("full")
    assert next(calls) < 2000 + 2200  # of 4000 documents
    make("whole")
    assert content_of(tmp_path / "full") == content_of(tmp_path / "whole")


def test_batches_are_read_while_later_ones_are_prepared(tmp_path, monkeypatch):
    monkeypatch.setattr(splits, "SAVED_TOKENS", 10_000)
    options = dict(
        corpus="synthetic", tokenizer="byte", shuffle_block=20_000, val_fraction=0.2
    )
    data, other = (
        DataConfig(**options, data_dir=str(tmp_path / n)) for n in ("whole", "part")
    )
    whole, allowed = (
        dataset.prepare(data),
        threading.Semaphore(400),
    )  # of 4000 documents
    append = tokens.TokenWriter.append
    slowly = lambda *given: allowed.acquire() and append(*given)  # noqa: E731
    monkeypatch.setattr(tokens.TokenWriter, "append", slowly)
    part = dataset.prepare(other, ahead=True)
    assert (
        part.growth and whole.describe().items() > part.describe().items()
    )  # a CRC among them
    shape = dict(batch_size=16, context_length=100)
    one, other = (TrainLoader(each, seed=1, **shape) for each in (whole, part))
    held, out = (
        ValidationLoader(each, num_batches=3, **shape) for each in (whole, part)
    )
    assert len(out) == 3 and not out.is_whole
    np.testing.assert_equal(out.batch(2), held.batch(2))
    for step in range(12):  # of the first block, all of it
        np.testing.assert_equal(other.batch(step), one.batch(step))
    assert other.epochs(12)[""] < 1 and not part.growth.whole.done()
    assert (
        Batches.phase.fget(SimpleNamespace(dataset=part)) == "preparation"
    )  # which may last
    allowed.release(10**6)
    for step in range(12, 2 * one.sources[""].num_rows // 16, 9):
        np.testing.assert_equal(other.batch(step), one.batch(step))
    assert part.whole().describe() == whole.describe() and other.epochs(
        step
    ) == one.epochs(step)
    assert part.targets_per_byte == whole.targets_per_byte


def test_a_corpus_can_be_entered_at_any_document(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = [None if number % 5 == 2 else f"{number}" for number in range(40)]
    for number in range(2):
        part = pyarrow.table({"text": texts[20 * number :][:20]})
        pyarrow.parquet.write_table(part, f"{number}.parquet", row_group_size=7)
    for corpus in map(open_corpus, ("parquet:*.parquet", "text:*.parquet")):
        everything = list(corpus.documents())
        assert len(everything) in (2, 40)
        for number in range(41):
            assert list(corpus.seek(number)) == everything[number:]


def test_statistics_are_counts_of_what_is_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "CHUNK", 50)
    texts = [
        "é" * number for number in (5, 31, 32, 99, 128, 600, 9000, 5, 7)
    ]  # two bytes each
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = dict(
        corpus=f"jsonl:{path}", tokenizer="byte", val_fraction=0.01, unique=True
    )
    made = dataset.prepare(DataConfig(**options, data_dir=str(tmp_path / "data")))
    told = json.loads((made.directory / "prepared.json").read_text())
    train, held_out = told["statistics"]["train"], told["statistics"]["validation"]
    total = {name: train[name] + held_out[name] for name in train}
    del total["bytes per token"]
    lengths = np.array(
        [2 * len(text) + 1 for text in texts[:7] + texts[8:]]
    )  # one came before
    assert told["num_dropped"] == 1
    assert list(total.values()) == [
        8,
        lengths.sum(),
        lengths.sum() - 8,
        0,
        3,
        2,
        1,
        1,
        0,
        1,
    ]
    assert train["bytes per token"] == round(
        1 - train["documents"] / train["tokens"], 4
    )
    page = (made.directory / "README.md").read_text()
    assert f"| tokens | {train['tokens']:,} | {held_out['tokens']:,} |" in page
    assert (
        f"--config.data.corpus=jsonl:{path}" in page
        and "--config.data.unique=True" in page
    )
