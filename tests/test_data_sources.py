"""Text and tokens from elsewhere: the hub, TFDS, and ready token shards."""

import importlib
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from gpt2.config import DataConfig
from gpt2.data import dataset as prepare
from gpt2.data.tokenizer import build
from gpt2.data.tokens import open_ready_tokens
from gpt2.errors import UserError
from tests.helpers import thorough

TEXTS = [f"{number}: some words, then {number**3} naïve 測試 cats\n" for number in range(80)]


@pytest.fixture
def make(tmp_path):
    """Prepares a corpus into a directory of the test's own."""

    def make(corpus, tokenizer="byte", val_fraction=0.1):
        data_dir = str(tmp_path / "prepared")
        data = DataConfig(
            corpus=corpus, tokenizer=tokenizer, val_fraction=val_fraction, data_dir=data_dir
        )
        return prepare.prepare(data)

    return make


def _stream(dataset, split):
    stream = dataset.open(split)
    return stream.read(0, len(stream))


@pytest.fixture
def hub(tmp_path):
    """Stands for the hub's file system: Parquet copies of data sets in a folder."""
    import fsspec

    return fsspec.filesystem("dir", path=str(tmp_path / "hub"), target_protocol="file")


@pytest.mark.parametrize("folder", ["default/train", "plain_text/partial-train"])
def test_hub_data_set_is_read_from_its_parquet_files(hub, make, monkeypatch, tmp_path, folder):
    monkeypatch.setattr("huggingface_hub.HfFileSystem", lambda: hub)
    root = tmp_path / "hub/datasets/someone/texts@refs/convert/parquet"
    (root / folder).mkdir(parents=True)
    (root / folder).with_name("test").mkdir()
    for number in range(2):
        table = pyarrow.table({"text": TEXTS[40 * number : 40 * (number + 1)]})
        pyarrow.parquet.write_table(table, root / folder / f"{number}.parquet")
    dataset = make("hf:someone/texts#text")
    joined = np.concatenate([_stream(dataset, split) for split in ("train", "validation")])
    read = dataset.tokenizer.decode(joined).split("<|endoftext|>")[1:]
    assert sorted(read) == sorted(TEXTS)
    with pytest.raises(UserError, match="hf:someone/else cannot be read"):
        make("hf:someone/else#text")


def test_documents_of_a_users_own_function(tmp_path, make, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = tmp_path / "own_documents.py"
    module.write_text("def poems():\n    for i in range(50):\n        yield f'{i} roses' * 9\n")
    dataset = make("python:own_documents:poems")
    joined = np.concatenate([_stream(dataset, split) for split in ("train", "validation")])
    read = dataset.tokenizer.decode(joined).split("<|endoftext|>")[1:]
    assert sorted(read) == sorted(f"{i} roses" * 9 for i in range(50))
    module.write_text(module.read_text() + "# changed\n")
    assert make("python:own_documents:poems").directory != dataset.directory
    with pytest.raises(UserError, match="cannot be imported"):
        make("python:own_documents:songs")
    for returned in ("'one text'", "[1, 2]"):
        module.write_text(f"def poems():\n    return {returned}\n")
        importlib.reload(sys.modules["own_documents"])
        with pytest.raises(UserError, match="iterable of str"):
            make("python:own_documents:poems")


def _write_shard(path, tokens, header):
    start = np.zeros(256, np.int32)
    start[:3] = 20240520, 1, len(tokens)
    tokens = np.asarray(tokens, np.uint16)
    path.write_bytes((start.tobytes() if header else b"") + tokens.tobytes())


@pytest.mark.parametrize("header", [thorough(False), True])
def test_token_shards_are_read_in_place(tmp_path, make, header):
    gpt2 = build("gpt2")
    texts = TEXTS[:9]
    encoded = [np.concatenate([[gpt2.eot], gpt2.encode(t)]) for t in texts]
    for number in range(3):
        name = f"{'val' if number == 0 else 'train'}_{number}.bin"
        _write_shard(tmp_path / name, np.concatenate(encoded[3 * number :][:3]), header)
    dataset = make(f"tokens:{tmp_path}/*.bin", "gpt2")
    np.testing.assert_array_equal(_stream(dataset, "validation"), np.concatenate(encoded[:3]))
    np.testing.assert_array_equal(_stream(dataset, "train"), np.concatenate(encoded[3:]))
    stream = dataset.open("train")
    everything = np.concatenate(encoded[3:])
    for start in range(0, len(stream), 11):
        np.testing.assert_array_equal(stream.read(start, 200), everything[start:][:200])
    assert dataset.splits["validation"].num_bytes == len("".join(texts[:3]).encode())
    assert dataset.splits["train"].num_documents == 6

    alone = make(f"tokens:{tmp_path}/train_*.bin", "gpt2", val_fraction=0.25)
    num_train = int(len(everything) * 0.75)
    np.testing.assert_array_equal(_stream(alone, "train"), everything[:num_train])
    np.testing.assert_array_equal(_stream(alone, "validation"), everything[num_train:])
    whole = make(f"tokens:{tmp_path}/train_*.bin", "gpt2", val_fraction=1.0)
    np.testing.assert_array_equal(_stream(whole, "validation"), everything)
    assert len(whole.open("train")) == 0


def test_broken_token_shards_are_refused(tmp_path, make):
    path = tmp_path / "train.bin"
    _write_shard(path, range(1000), header=True)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="has 950 tokens, and its header says version 1 and 1000"):
        make(f"tokens:{path}", "gpt2")
    _write_shard(path, range(50), header=False)
    for share, split in ((0.01, "validation"), (0.99, "train")):
        with pytest.raises(UserError, match=rf"the {split} split .* no token"):
            make(f"tokens:{path}", "gpt2", val_fraction=share)
    _write_shard(path, [60_000] * 100, header=False)
    with pytest.raises(UserError, match="token 60000"):
        make(f"tokens:{path}", "gpt2")
    path.write_bytes(b"odd")
    with pytest.raises(UserError, match="not a shard"):
        make(f"tokens:{path}", "gpt2")


@pytest.mark.parametrize(
    ("name", "is_validation"),
    [
        ("val.bin", True),
        ("fineweb_val_000000.bin", True),
        ("books-Validation.bin", True),
        ("interval.bin", False),
        ("values_0.bin", False),
    ],
)
def test_the_validation_shards_are_those_with_the_word_in_their_name(name, is_validation, tmp_path):
    for path, tokens in ((tmp_path / name, [1, 2, 3]), (tmp_path / "b.bin", [4] * 7)):
        np.array(tokens, np.uint16).tofile(path)
    ready = open_ready_tokens(DataConfig(corpus=f"tokens:{tmp_path}/*.bin", val_fraction=0.2))
    (split,) = ready.shards["validation"]
    assert split[2] == (3 if is_validation else 2)
