"""Tokenizers into Hugging Face's files and out of them."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import peer
import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from gpt2 import hf
from gpt2.config import GPTConfig
from gpt2.data.tokenizer import ByteTokenizer, CharTokenizer, gpt2_tokenizer, train_bpe
from gpt2.errors import UserError
from gpt2.hf.runs import import_run
from gpt2.hf.tensor_files import read_safetensors
from gpt2.hf.tokenizer import count_tokens, load_tokenizer, save_tokenizer
from gpt2.model import GPT
from gpt2.weights import load_initial_params, load_model

TABLES = ("wte", "lm_head")
TEXT = "Hello there, world!\n\tdef f(x): return 'é漢字😀'  \n don't"


def make_tokenizers():
    characters = "".join(sorted(set(TEXT)))
    return {
        "gpt2": gpt2_tokenizer(),
        "byte": ByteTokenizer(),
        "char": CharTokenizer(characters, has_eot=True),
        "char, one text": CharTokenizer(characters, has_eot=False),
        "bpe": train_bpe(300, [TEXT * 20]),
    }


@pytest.mark.parametrize("name", list(make_tokenizers()))
def test_exported_tokenizer_reads_and_writes_the_same_text(name, tmp_path):
    tokenizer = make_tokenizers()[name]
    save_tokenizer(tmp_path, tokenizer, 64)
    loaded = load_tokenizer(tmp_path, GPTConfig(vocab_size=tokenizer.vocab_size))
    ids = tokenizer.encode(TEXT)
    np.testing.assert_array_equal(loaded.encode(TEXT), ids)
    assert loaded.decode(ids) == TEXT
    assert loaded.eot == tokenizer.eot


@peer.needs_peers
@pytest.mark.parametrize("name", list(make_tokenizers()))
def test_transformers_loads_an_export_with_nothing_missing(name, tmp_path):
    from transformers import AutoTokenizer, GPT2LMHeadModel, pipeline

    tokenizer = make_tokenizers()[name]
    cfg = GPTConfig(
        vocab_size=tokenizer.vocab_size, context_length=64, num_layers=1, num_heads=2, embed_dim=8
    )
    params = jax.jit(GPT(cfg).init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    hf.save(tmp_path / "out", cfg, params, tokenizer)
    _, info = GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(TEXT)["input_ids"] == (
        tokenizer.encode(TEXT).tolist()
    )
    (answer,) = pipeline("text-generation", str(tmp_path / "out"))("Hello", max_new_tokens=2)
    assert answer["generated_text"].startswith("Hello")


@pytest.mark.parametrize("damage", ["{", '{"a": 0}'])
def test_damaged_vocabulary_is_told_in_one_line(damage, tmp_path):
    (tmp_path / "vocab.json").write_text(damage)
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    with pytest.raises(UserError, match=r"vocab.json and merges.txt are not a tokenizer") as raised:
        load_tokenizer(tmp_path, GPTConfig(vocab_size=3))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [192, 500])
def test_export_leaves_padding_out_and_imports_to_the_same_bits(rows, tied, tmp_path):
    cfg = GPTConfig(
        vocab_size=rows, context_length=16, num_layers=1, num_heads=2, embed_dim=8,
        tie_embeddings=tied,
    )  # fmt: skip
    params = jax.jit(GPT(cfg).init)(jax.random.key(0), np.zeros((1, 8), np.int32))["params"]
    hf.save(tmp_path / "out", cfg, params, peer.characters(131))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 131
    weights = read_safetensors(tmp_path / "out" / "model.safetensors")
    for name, table in zip(("transformer.wte.weight", "lm_head.weight"), TABLES, strict=True):
        assert (name in weights) == (table in params)
        if table in params:
            np.testing.assert_array_equal(weights[name].read(), params[table]["embedding"][:131])

    import_run(tmp_path / "out", tmp_path / "run")
    hf.save(tmp_path / "again", *load_model(tmp_path / "run", None))
    for file in (tmp_path / "out").iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("rows", [192, 256])
def test_padding_of_a_directory_is_left_out_of_every_import(rows, tmp_path, monkeypatch):
    monkeypatch.setitem(peer.CONFIGS, "padded", peer.CONFIGS["untied"] | {"vocab_size": rows})
    source = peer.write_model(tmp_path / "source", "padded")
    _, whole = hf.load(source)
    assert whole["wte"]["embedding"].shape[0] == rows  # without a tokenizer all rows count
    save_tokenizer(source, peer.characters(131), 96)
    import_run(source, tmp_path / "run")
    expected = whole | {name: {"embedding": whole[name]["embedding"][:131]} for name in TABLES}
    for place in ((tmp_path / "run", None), (None, source)):
        cfg, params, tokenizer = load_model(*place)
        assert cfg.vocab_size == tokenizer.vocab_size == 131
        chex.assert_trees_all_equal(params, expected)
        start = load_initial_params(f"hf:{source}", cfg, tokenizer)
        chex.assert_trees_all_equal(start, expected)


def test_rows_for_tokens_to_come_are_few(tmp_path):
    save_tokenizer(tmp_path, peer.characters(13000), 96)
    for rows, is_padding in ((13056, True), (13120, True), (13184, False), (13100, False)):
        cfg = GPTConfig(vocab_size=rows)
        assert count_tokens(tmp_path, cfg) == (13000 if is_padding else rows)
        if is_padding:
            assert load_tokenizer(tmp_path, cfg).vocab_size == 13000
        else:
            with pytest.raises(UserError, match=f"has 13000 tokens, and the model has {rows}"):
                load_tokenizer(tmp_path, cfg)


def llama3_tokenizer(path):
    """Writes a tokenizer.json as Llama 3 has it: a pattern of its own, and a token at the start."""
    backend = Backend(models.BPE(ignore_merges=True))
    pattern = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([TEXT * 20], trainer)
    backend.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    first = ("<|begin_of_text|>", backend.token_to_id("<|begin_of_text|>"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[first]
    )
    backend.save(str(path))
    return backend


def test_a_tokenizer_like_llama_3s_comes_in_and_goes_out(tmp_path):
    backend = llama3_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(tmp_path, GPTConfig(vocab_size=backend.get_vocab_size()))
    expected = backend.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.encode(TEXT).tolist() == expected
    assert tokenizer.decode(expected) == TEXT
    assert tokenizer.eot == backend.token_to_id("<|end_of_text|>")
    (tmp_path / "out").mkdir()
    save_tokenizer(tmp_path / "out", tokenizer, 64)
    again = Backend.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert again.encode(TEXT).ids == backend.encode(TEXT).ids


def test_a_directory_with_a_sentencepiece_file_alone_holds_no_tokenizer(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UserError, match=r"holds no tokenizer\. Add the tokenizer\.json"):
        load_tokenizer(tmp_path, GPTConfig(vocab_size=32000))
