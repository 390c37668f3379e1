"""Corpora, preparing and storing: what goes in comes out, once, whole and split apart."""

import gzip
import os
import re
import threading
from pathlib import Path

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from gpt2.data import tokens
from gpt2.data.preparing import documents as documents_module
from gpt2.data.preparing import prepared_folder, text_corpus
from gpt2.data.preparing.text_corpus import TextCorpus
from gpt2.data.readers import open_corpus
from gpt2.data.tokenizer import build
from gpt2.errors import UserError
from tests.helpers import DAMAGES, documents_of, tokens_of, write_rows

WORDS = "the quick brown fox jumps over lazy dogs naïve 測試"


def _document(number: int, num_words: int = 60) -> str:
    rng = np.random.default_rng(number)
    return f"{number}: " + " ".join(rng.choice(WORDS.split(), num_words)) + "\n"


@pytest.fixture
def many(tmp_path):
    """A corpus of 200 documents, ten of them twice, as (spec, documents)."""
    documents = [_document(i) for i in [*range(190), *range(10)]]
    path = tmp_path / "documents.jsonl"
    write_rows(path, [{"body": document} for document in documents])
    return f"jsonl:{path}#body", documents


def test_single_text_is_split_as_nanogpt_splits_it(tmp_path, make):
    text = "".join(_document(i) for i in range(40)) + "odd"
    (tmp_path / "input.txt").write_text(text, encoding="utf-8")
    dataset = make(f"text:{tmp_path}/input.txt", "char")
    characters = sorted(set(text))
    assert dataset.tokenizer.vocab_size == len(characters)
    num_train = int(len(text) * 0.9)
    validation = text[num_train:]
    for split, part in (("train", text[:num_train]), ("validation", validation)):
        wanted = [characters.index(c) for c in part]
        np.testing.assert_array_equal(tokens_of(dataset, split), wanted)
    counts = dataset.splits["validation"]
    assert counts.num_tokens == len(validation)
    assert counts.num_bytes == len(validation.encode())
    assert counts.num_documents == 1


@pytest.mark.parametrize("tokenizer", ["byte", "gpt2", "bpe:300", "char"])
def test_documents_are_joined_by_end_of_text_and_all_kept_in_one_split_each(
    make, many, tokenizer
):
    spec, documents = many
    dataset = make(spec, tokenizer)
    train = documents_of(dataset, "train")
    validation = documents_of(dataset, "validation")
    assert sorted(train + validation) == sorted(documents)
    assert train
    assert validation
    assert {*train}.isdisjoint(validation)
    for split, texts in (("train", train), ("validation", validation)):
        assert dataset.splits[split].num_documents == len(texts)
        assert dataset.splits[split].num_bytes == len("".join(texts).encode())


@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.5])
def test_validation_is_the_fraction_of_bytes_asked_for(make, many, fraction):
    splits = make(many[0], val_fraction=fraction).splits
    total = sum(split.num_bytes for split in splits.values())
    wanted = pytest.approx(fraction, abs=0.01)
    assert splits["validation"].num_bytes / total == wanted


def test_all_of_a_text_may_be_validation_for_a_model_that_is_only_scored(
    make, many, tmp_path
):
    spec, documents = many
    dataset = make(spec, val_fraction=1.0)
    assert len(dataset.stream("train")) == 0
    assert dataset.splits["validation"].num_documents == len(documents)
    text = "one text\n" * 100
    (tmp_path / "alone.txt").write_text(text)
    dataset = make(f"text:{tmp_path}/alone.txt", val_fraction=1.0)
    assert len(dataset.stream("train")) == 0
    assert dataset.tokenizer.decode(tokens_of(dataset, "validation")) == text


def test_documents_of_huge_corpora_are_assigned_one_by_one(tmp_path, make, monkeypatch):
    monkeypatch.setattr(documents_module, "WEIGHED", 0)

    def validation(count):
        path = tmp_path / f"{count}.jsonl"
        write_rows(path, [{"text": _document(i)} for i in reversed(range(count))])
        return set(documents_of(make(f"jsonl:{path}"), "validation"))

    few = validation(100)
    assert 2 <= len(few) <= 25
    assert few == validation(150) & {_document(i) for i in range(100)}


def test_file_formats_agree(tmp_path, make, monkeypatch):
    documents = [_document(i) for i in range(60)]
    texts = tmp_path / "texts"
    texts.mkdir()
    for number, text in enumerate(documents):
        encoding = "utf-8-sig" if number % 2 else "utf-8"
        (texts / f"{number:02}.txt").write_text(text, encoding=encoding)
    (texts / "empty.txt").touch()
    (texts / "loop").symlink_to(texts)
    table = pyarrow.table({"text": [*documents, None]})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    write_rows(tmp_path / "d.jsonl", [{"text": document} for document in documents])
    lines = (tmp_path / "d.jsonl").read_bytes()
    cut = len(lines) // 2  # two members, as parallel compressors write them
    for ending, codec in (("gz", "gzip"), ("zst", "zstd")):
        members = b""
        for part in (lines[:cut], lines[cut:]):
            members += pyarrow.compress(part, codec).to_pybytes()
        (tmp_path / f"d.jsonl.{ending}").write_bytes(members)
    reads = f"def read():\n    yield from {documents!r}\n"
    (tmp_path / "listed_documents.py").write_text(reads)
    monkeypatch.syspath_prepend(tmp_path)
    corpora = [
        "python:listed_documents:read",
        f"text:{texts}/**/*.txt",
        f"parquet:{tmp_path}/*.parquet",
        f"jsonl:{tmp_path}/d.jsonl",
        f"jsonl:{tmp_path}/d.jsonl.gz",
        f"jsonl:{tmp_path}/d.jsonl.zst",
    ]
    streams = []
    for corpus in corpora:
        dataset = make(corpus, "gpt2")
        train = tokens_of(dataset, "train")
        streams.append([*train, *tokens_of(dataset, "validation")])
    order = documents_of(dataset, "train", "validation")
    assert sorted(order) == sorted(documents)
    encoding = dataset.tokenizer._encoding  # tiktoken's
    joined = "".join(f"<|endoftext|>{document}" for document in order)
    expected = encoding.encode(joined, allowed_special="all")
    for stream in streams:
        assert stream == expected


def test_a_link_to_a_missing_file_is_an_error(tmp_path, make):
    (tmp_path / "a.txt").write_text("some words")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=r"b\.txt is a link to .*gone, which does not"):
        make(f"text:{tmp_path}/*.txt")


@pytest.mark.parametrize(
    ("kind", "num_skipped"), [("jsonl", 3), ("parquet", 3), ("txt", 2)]
)
def test_documents_without_text_are_skipped_and_counted(
    tmp_path, make, capsys, kind, num_skipped
):
    texts = ["", "some words", " \n", "", "more words"]
    records = [*texts, None]
    path = tmp_path / f"records.{kind}"
    corpus = f"{kind}:{path}"
    if kind == "jsonl":
        write_rows(path, [{"text": text} for text in records])
        path.write_text(path.read_text() + "\n \n")  # blank lines are not records
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": records}), path)
    else:
        for number, text in enumerate(texts):
            (tmp_path / f"{number}.txt").write_text(text)
        corpus = f"text:{tmp_path}/*.txt"
    dataset = make(corpus, val_fraction=0.5)
    kept = documents_of(dataset, "train", "validation")
    assert sorted(kept) == [" \n", "more words", "some words"]
    line = f"skipped {num_skipped} of {num_skipped + 3} documents, because they contain no text\n"
    assert capsys.readouterr().out.count(line) == 1
    again = make(corpus, val_fraction=0.5)
    assert again.describe() == dataset.describe()
    assert again.describe()["num_skipped"] == num_skipped
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", ["gz", "zst", "parquet", "jsonl"])
def test_progress_is_the_fraction_of_the_files_that_was_read(
    tmp_path, make, capsys, monkeypatch, kind
):
    monkeypatch.setattr(text_corpus, "SECONDS", -1)
    monkeypatch.setattr(text_corpus, "AHEAD", 0)
    monkeypatch.setattr(documents_module, "PART_CHARACTERS", 4096)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    for number in range(4):
        # Compressed, these documents are a tenth as large.
        texts = [f"{number} {i} " + "the same words " * 200 for i in range(20)]
        path = tmp_path / f"{number}.{kind}"
        if kind == "parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
            continue
        write_rows(path, [{"text": text} for text in texts])
        if kind != "jsonl":
            codec = {"gz": "gzip", "zst": "zstd"}[kind]
            content = pyarrow.compress(path.read_bytes(), codec).to_pybytes()
            path.with_suffix(f".jsonl.{kind}").write_bytes(content)
    prefix = "parquet" if kind == "parquet" else "jsonl"
    pattern = f"*.{kind}" if kind in ("parquet", "jsonl") else f"*.jsonl.{kind}"
    make(f"{prefix}:{tmp_path}/{pattern}")
    shown = re.findall(r"tokens, (\d+)% of the text", capsys.readouterr().out)
    percents = [int(number) for number in shown]
    assert percents == sorted(percents)
    assert percents[0] < 30
    assert len({*percents}) == 4  # each file is read in one step
    # A Parquet file ends with metadata.
    assert 85 < percents[-1] <= 100


@pytest.mark.parametrize(
    ("path", "corpus"),
    [
        ("[2024] notes/a.txt", "text:[2024] notes/a.txt"),
        ("[2024] notes/b.txt", "text:[2024] notes/*.txt"),
        ("[2024] notes/a.jsonl", "jsonl:[2024] notes/a.jsonl#text"),
        ("what? *.jsonl", "jsonl:what? *.jsonl"),
        ("c#/a.jsonl", "jsonl:c#/a.jsonl"),
        ("c#/b.jsonl", "jsonl:c#/*.jsonl#text"),
        ("c#.jsonl", "jsonl:c#.jsonl"),
        ("a (1)/a.jsonl", "jsonl:a (1)/a.jsonl#text"),
        ("2024/a.txt", "text:[0-9]*/a.txt"),
    ],
)
def test_names_with_marks_of_patterns_are_read(tmp_path, monkeypatch, path, corpus):
    monkeypatch.chdir(tmp_path)
    file = Path(path)
    file.parent.mkdir(exist_ok=True)
    write_rows(file, [{"text": "text"}])
    source = open_corpus(corpus).source
    assert [str(path) for path in source.paths] == [path]
    if file.suffix == ".jsonl":
        assert list(open_corpus(corpus).documents()) == ["text"]


def test_a_name_in_a_store_may_have_brackets():
    store = fsspec.filesystem("memory")
    store.pipe_file("/names/[2024] notes/a.jsonl", b'{"text": "text"}\n')
    corpus = open_corpus("jsonl:memory://names/[2024] notes/*.jsonl#text")
    assert list(corpus.documents()) == ["text"]


def test_any_stretch_can_be_read_across_files(tmp_path):
    ids = np.random.default_rng(0).integers(0, 70_000, 400)
    stored = {"train": tokens.Split(), "validation": tokens.Split()}
    writer = tokens.TokenWriter(tmp_path, 70_000, stored)
    for part in np.split(ids, [1, 3, 50, 50, 333]):
        writer.append("train", part)
        writer.flush()
    writer.append("validation", ids[:9])
    assert writer.flush() == ["validation-00000.bin"]
    assert writer.dtype == np.uint32
    assert len(stored["train"].shards) == 5
    stream = tokens.TokenStream(stored["train"].shards, "uint32", tmp_path)
    assert len(stream) == 400
    for start in range(0, 400, 3):
        for length in (1, 7, 8, 40, 400):
            part = stream.read(start, length)
            np.testing.assert_array_equal(part, ids[start:][:length])
    validation = tokens.TokenStream(stored["validation"].shards, "uint32", tmp_path)
    assert validation.read(0, 99).tolist() == list(ids[:9])


def test_long_documents_encode_as_if_whole(monkeypatch):
    gpt2 = build("gpt2")
    text = "".join(_document(i, 9) + "\n\n  \n if x:\t\r\n" for i in range(60))
    whole = gpt2.encode(text)
    for size in (50, 97, 300):
        monkeypatch.setattr(documents_module, "PART_CHARACTERS", size)
        parts = list(documents_module.read_parts(text))
        assert len(parts) > 10
        np.testing.assert_array_equal(
            np.concatenate([gpt2.encode(p) for p in parts]), whole
        )


# Of cl100k (OpenAI's tiktoken): a token may hold line ends after the marks before them.
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize("pattern", [CL100K, r"\n+"])
def test_a_long_document_has_the_tokens_of_the_library_by_any_pattern(
    tmp_path, make, monkeypatch, pattern
):
    lines = [f"if (a{i % 7} == {i % 13}) {{\n\treturn f(x);\n}}\n" for i in range(300)]
    code = "".join(lines)
    backend = Tokenizer(models.BPE())
    backend.decoder = decoders.ByteLevel()
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=["<|endoftext|>"],
    )
    backend.train_from_iterator([code], trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "code.txt"
    path.write_text(code)
    monkeypatch.setattr(documents_module, "PART_CHARACTERS", 100)
    tokens = make(f"text:{path}", str(tmp_path / "tokenizer.json"), val_fraction=0.5)
    halves = code[: len(code) // 2], code[len(code) // 2 :]
    for split, half in zip(("train", "validation"), halves, strict=True):
        expected = backend.encode(half, add_special_tokens=False).ids
        np.testing.assert_array_equal(tokens_of(tokens, split), expected)
    monkeypatch.setattr(documents_module, "WHOLE_CHARACTERS", 1000)
    told = "code.txt has more than .* which encodes each document whole"
    with pytest.raises(UserError, match=told):
        make(f"text:{path}", str(tmp_path / "tokenizer.json"), val_fraction=0.4)
    # A document of a JSON Lines file has no path, and its text is too long for a message.
    with pytest.raises(UserError, match=r"^A document has more than"):
        list(documents_module.read_parts(code, whole=True))


def test_megabytes_without_white_space_are_not_cut(monkeypatch):
    monkeypatch.setattr(documents_module, "PART_CHARACTERS", 100)
    text = "ab" * 333 + " cd" + "ef" * 444 + "\ng"
    parts = list(documents_module.read_parts(text))
    assert parts == ["ab" * 333, " cd" + "ef" * 444, "\ng"]


def test_more_shards_are_read_than_files_stay_open(tmp_path):
    ids = np.arange(3 * tokens.OPEN_MAPS)
    split = {"train": tokens.Split()}
    writer = tokens.TokenWriter(tmp_path, 70_000, split)
    for token in ids:
        writer.append("train", token[None])
        writer.flush()
    stream = tokens.TokenStream(split["train"].shards, "uint32", tmp_path)
    descriptors = Path("/proc/self/fd")
    num_before = len(list(descriptors.iterdir())) if descriptors.exists() else 0
    np.testing.assert_array_equal(stream.read(0, len(ids)), ids)
    if num_before:
        num_open = len(list(descriptors.iterdir())) - num_before
        assert num_open <= tokens.OPEN_MAPS


def test_prepared_once_and_anew_when_anything_differs(tmp_path, make):
    path = tmp_path / "input.txt"
    path.write_text(_document(1, 500))
    first = make(f"text:{path}")
    stamp = (first.directory / "prepared.json").stat().st_mtime_ns
    assert make(f"text:{path}").directory == first.directory
    assert (first.directory / "prepared.json").stat().st_mtime_ns == stamp
    directories = {first.directory}
    directories.add(make(f"text:{path}", "char").directory)
    directories.add(make(f"text:{path}", val_fraction=0.2).directory)
    path.write_text(_document(2, 500))
    directories.add(make(f"text:{path}").directory)
    assert len(directories) == 4


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_prepared_corpus_is_named_and_prepared_anew(
    tmp_path, make, capsys, damage
):
    path = tmp_path / "input.txt"
    path.write_text(_document(1, 500))
    whole = make(f"text:{path}")
    wanted = tokens_of(whole, "train")
    files = list(whole.directory.iterdir())
    assert len(files) > 3
    for file in files:
        damage(file)
        capsys.readouterr()
        again = make(f"text:{path}")
        np.testing.assert_array_equal(tokens_of(again, "train"), wanted)
        warning = f"warning: {again.directory} is damaged, so it is prepared again\n"
        if damage is Path.unlink and file.name == "prepared.json":
            warning = ""  # nothing was prepared
        assert capsys.readouterr().err == warning


def test_preparing_at_once_is_done_by_one_and_others_say_that_they_wait(
    tmp_path, make, monkeypatch
):
    writes = []
    begun = threading.Event()
    waiting = threading.Semaphore(0)
    write = TextCorpus.write

    def counted(*arguments):
        writes.append(arguments)
        begun.set()
        for _ in range(2):
            assert waiting.acquire(timeout=60)
        return write(*arguments)

    monkeypatch.setattr(TextCorpus, "write", counted)

    def log(message, *_):
        if message.startswith("waiting for another process"):
            waiting.release()

    monkeypatch.setattr(prepared_folder, "log", log)
    path = tmp_path / "input.txt"
    path.write_text(_document(1, 500))
    # A lock on a file is its descriptor's: threads stand for processes here.
    datasets = []
    threads = [
        threading.Thread(target=lambda: datasets.append(make(f"text:{path}")))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
        assert begun.wait(60)
    for thread in threads:
        thread.join()
    assert len(datasets) == 3 and len(writes) == 1


def test_failed_preparation_leaves_nothing(tmp_path, make):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "good"}\n{"text": "too"}\nbad\n')
    with pytest.raises(
        UserError, match=r"bad\.jsonl:3 cannot be read .Expecting value"
    ):
        make(f"jsonl:{path}")
    assert [p.suffix for p in (tmp_path / "prepared").iterdir()] == [".lock"]


def test_a_text_that_changes_while_it_is_read_is_not_prepared(
    tmp_path, make, monkeypatch
):
    path = tmp_path / "input.txt"
    write = TextCorpus.write
    path.write_text(_document(1, 500))

    def change(*arguments):
        facts = write(*arguments)
        path.write_text(_document(2, 500))
        return facts

    with monkeypatch.context() as patched:
        patched.setattr(TextCorpus, "write", change)
        with pytest.raises(UserError, match=r"input\.txt changed while it was read"):
            make(f"text:{path}")
    assert [p.suffix for p in (tmp_path / "prepared").iterdir()] == [".lock"]
    make(f"text:{path}")


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        ("text:EMPTY", "contains no text"),
        ("jsonl:CUT.gz", r"CUT\.gz cannot be read .*Truncated"),
        (
            "text:TINY",
            "no token to predict in the train split of data.corpus=text:TINY",
        ),
        ("jsonl:LINES#body", "LINES:1 cannot be read .*'body' is missing"),
        ("jsonl:LINES#number", "LINES:1 cannot be read .*'number' is not a string"),
        ("parquet:TABLE#body", "TABLE cannot be read .*Column body does not exist"),
        ("parquet:TABLE#number", "'number' does not contain strings"),
    ],
)
def test_corpora_that_cannot_be_used_are_refused(
    tmp_path, make, monkeypatch, corpus, message
):
    monkeypatch.chdir(tmp_path)
    Path("EMPTY").touch()
    Path("TINY").write_text("a")
    Path("CUT.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 99)[:-9])
    Path("LINES").write_text('{"text": "a", "number": 1}\n')
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"], "number": [1]}), "TABLE")
    with pytest.raises(UserError, match=message):
        make(corpus)
