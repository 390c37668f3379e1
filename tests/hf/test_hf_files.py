"""Files of Hugging Face: tokenizers, padding and damage."""

import itertools
import json
from functools import partial

import chex
import jax
import numpy as np
import peer
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file
from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from gpt2 import hf
from gpt2.config import GPTConfig
from gpt2.data.tokenizer import CharTokenizer, build, gpt2_tokenizer, train_bpe
from gpt2.errors import UserError, exit_on_user_error
from gpt2.hf.tokenizer_files import load_tokenizer, save_tokenizer
from gpt2.hf.weights import import_run, load_initial_params, load_model
from gpt2.model import GPT
from gpt2.model.sampling import Sampling, generate
from gpt2.utils.files import new_directory
from tests.helpers import configured, first_params
from tests.hf.families import LLAMA, NEOX

INDEX = "model.safetensors.index.json"
TEXT = "Hello there, world!\n\tdef f(x): return 'é漢字😀'  \n don't"
CHARACTERS = "".join(sorted(set(TEXT)))
TOKENIZERS = {
    "gpt2": gpt2_tokenizer,
    "byte": lambda: build("byte"),
    "char": lambda: CharTokenizer(CHARACTERS, has_eot=True),
    "char, one text": lambda: CharTokenizer(CHARACTERS, has_eot=False),
    "bpe": lambda: train_bpe(300, [TEXT * 20]),
}


def make_model(vocab_size, options=""):
    sizes = "context_length=64 num_layers=1 num_heads=2 embed_dim=8"
    cfg = configured(f"vocab_size={vocab_size} {sizes} {options}", "model.").gpt()
    return cfg, first_params(cfg)


@pytest.fixture
def source(tmp_path):
    return peer.write_model(tmp_path / "source", "tied")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_exported_tokenizer_reads_and_writes_the_same_text(name, tmp_path):
    tokenizer = TOKENIZERS[name]()
    save_tokenizer(tmp_path, tokenizer, 64)
    loaded = load_tokenizer(tmp_path, GPTConfig(vocab_size=tokenizer.vocab_size))
    ids = tokenizer.encode(TEXT)
    np.testing.assert_array_equal(loaded.encode(TEXT), ids)
    assert loaded.decode(ids) == TEXT
    assert loaded.eot == tokenizer.eot


@peer.needs_peers
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, "") for name in TOKENIZERS),
        *((name, LLAMA) for name in ("gpt2", "byte", "bpe")),
        ("bpe", f"{LLAMA} qk_norm=True"),
        ("bpe", NEOX),
    ],
)
def test_transformers_continues_text_with_an_export_as_this_project_does(
    name, options, tmp_path
):
    from transformers import AutoTokenizer, pipeline

    tokenizer = TOKENIZERS[name]()
    cfg, params = make_model(tokenizer.vocab_size, options)
    params = jax.tree.map(lambda x: 4 * x, params)
    hf.save(tmp_path / "out", cfg, params, tokenizer)
    prompt = tokenizer.encode(TEXT).tolist()
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded(TEXT)["input_ids"] == prompt
    prompt = prompt[:9]
    (ours,) = generate(
        GPT(cfg),
        params,
        [prompt],
        max_new_tokens=12,
        sampling=Sampling(0.0),
        eot=tokenizer.eot,
    )
    generator = pipeline("text-generation", str(tmp_path / "out"))
    (answer,) = generator(
        tokenizer.decode(prompt),
        max_new_tokens=12,
        do_sample=False,
        return_tensors=True,
    )
    theirs = answer["generated_token_ids"]
    assert [token for token in theirs if token != tokenizer.eot] == prompt + ours


def embedding(tree, name):
    return tree[name]["embedding"]


@pytest.mark.parametrize(("rows", "tied"), [(192, True), (500, False)])
def test_export_skips_padding_and_imports_to_the_same_bits(rows, tied, tmp_path):
    out = tmp_path / "out"
    cfg, params = make_model(rows, f"tie_embeddings={tied}")
    hf.save(out, cfg, params, peer.characters(131))
    config = json.loads((out / "config.json").read_text())
    assert config["vocab_size"] == 131
    weights = load_file(out / "model.safetensors")
    table = embedding(params, "wte")[:131]
    np.testing.assert_array_equal(weights["transformer.wte.weight"], table)
    assert ("lm_head.weight" in weights) == (not tied)
    if not tied:
        table = embedding(params, "lm_head")[:131]
        np.testing.assert_array_equal(weights["lm_head.weight"], table)
    import_run(out, tmp_path / "run")
    hf.save(tmp_path / "again", *load_model(tmp_path / "run", None))
    modes = set()
    for file in out.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
        modes.add(file.stat().st_mode)
    # The umask decides the mode of all files, also of the one that safetensors writes.
    assert len(modes) == 1


def test_padding_of_a_directory_is_skipped_by_every_import(tmp_path, monkeypatch):
    padded = peer.CONFIGS["untied"] | {"vocab_size": 192}
    monkeypatch.setitem(peer.CONFIGS, "padded", padded)
    source = peer.write_model(tmp_path / "source", "padded")
    _, expected = hf.load(source)
    # Without a tokenizer, all rows count.
    assert len(embedding(expected, "wte")) == 192
    for name in ("wte", "lm_head"):
        expected[name] = {"embedding": embedding(expected, name)[:131]}
    save_tokenizer(source, peer.characters(131), 96)
    import_run(source, tmp_path / "run")
    _, of_run, _ = load_model(tmp_path / "run", None)
    cfg, params, tokenizer = load_model(None, source)
    assert cfg.vocab_size == 131
    initial = load_initial_params(f"hf:{source}", cfg, tokenizer)
    for loaded in (of_run, params, initial):
        chex.assert_trees_all_equal(loaded, expected)


def test_a_parameter_that_no_tensor_has_is_refused(tmp_path):
    cfg, params = make_model(64)
    with pytest.raises(UserError, match="params contains gate, but the model"):
        hf.save(tmp_path / "out", cfg, params | {"gate": np.zeros(3)})


def test_rows_for_tokens_to_come_are_few(tmp_path):
    save_tokenizer(tmp_path, peer.characters(13000), 96)
    for rows in (13056, 13120):
        cfg = GPTConfig(vocab_size=rows)
        assert load_tokenizer(tmp_path, cfg).vocab_size == 13000
    for rows in (13184, 13100):
        with pytest.raises(UserError, match="has no tokenizer"):
            load_tokenizer(tmp_path, GPTConfig(vocab_size=rows))


def test_a_tokenizer_like_llama_3s_comes_in_and_goes_out(tmp_path, capsys):
    """Llama 3 has a pattern of its own, and a token at the start of each text."""
    backend = Backend(models.BPE(ignore_merges=True))
    pattern = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+")
    split = pre_tokenizers.Split(pattern, "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([TEXT * 20], trainer)
    backend.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    first = ("<|begin_of_text|>", backend.token_to_id("<|begin_of_text|>"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[first]
    )
    backend.save(str(tmp_path / "tokenizer.json"))

    tokenizer = load_tokenizer(tmp_path, GPTConfig(vocab_size=backend.get_vocab_size()))
    expected = backend.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.encode(TEXT).tolist() == expected
    assert tokenizer.decode(expected) == TEXT
    assert tokenizer.eot == backend.token_to_id("<|end_of_text|>")
    (tmp_path / "out").mkdir()
    save_tokenizer(tmp_path / "out", tokenizer, 64)
    again = Backend.from_file(str(tmp_path / "out" / "tokenizer.json"))
    # The token that training never saw is gone, and a warning says so.
    assert again.encode(TEXT).ids == expected != backend.encode(TEXT).ids
    assert "has no post_processor" in capsys.readouterr().err


@pytest.mark.parametrize(
    "merges",
    [
        # A trained vocabulary: its merges alone make every token.
        ["a b", "ab c", "ab ab"],
        # No merge makes abc, which needs bc, since a and b are merged before.
        ["a b", "b c", "a bc"],
        ["a a", "aa aa", "a aaaa"],
    ],
)
def test_merges_give_the_tokens_of_the_library(merges, tmp_path):
    save_tokenizer(tmp_path, build("byte"), 64)
    path = tmp_path / "tokenizer.json"
    tree = json.loads(path.read_text())
    vocabulary = tree["model"]["vocab"]
    tree["model"]["merges"] = merges
    (end,) = tree["added_tokens"]
    for number, merge in enumerate(merges, len(vocabulary)):
        vocabulary[merge.replace(" ", "")] = number
    end["id"] = len(vocabulary)
    path.write_text(json.dumps(tree))
    tokenizer = load_tokenizer(tmp_path, GPTConfig(vocab_size=len(vocabulary) + 1))
    theirs = Backend.from_file(str(path))
    for letters in itertools.product("abc", repeat=6):
        text = "".join(letters)
        assert tokenizer.encode(text).tolist() == theirs.encode(text).ids


def with_tensor(source, name, change):
    """Adds a tensor to a model, made of its table of embeddings, or changes it."""
    table = "transformer.wte.weight"
    peer.rewrite(source, lambda arrays: arrays | {name: change(arrays[table])})


@pytest.mark.parametrize("dtype", [np.int32, np.complex64])
def test_tensors_that_hold_no_weights_are_refused(dtype, source):
    with_tensor(source, "transformer.wte.weight", lambda table: table.astype(dtype))
    with pytest.raises(UserError, match="instead of floats"):
        hf.load(source)


def test_weights_beyond_float32_are_refused(source):
    huge = np.full((131, 32), 1e300)
    with_tensor(source, "transformer.wte.weight", lambda _: huge)
    with pytest.raises(UserError, match="NaN or Inf"):
        hf.load(source)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lm_head.weight", "ties lm_head"),
        ("wte.weight", r"wte\.weight twice, with different values"),  # OpenAI's name
    ],
)
def test_two_tensors_for_one_parameter_have_to_be_equal(name, message, source):
    expected = hf.load(source)
    with_tensor(source, name, np.copy)
    chex.assert_trees_all_equal(hf.load(source), expected)
    with_tensor(source, name, lambda table: 2 * table)
    with pytest.raises(UserError, match=message):
        hf.load(source)


def test_a_shard_that_is_left_from_an_earlier_save_is_refused(source):
    peer.rewrite(source, dict, shards=2)
    shard = load_file(source / "model-0.safetensors")
    changed = {name: array + 1 for name, array in shard.items()}
    peer.save_file(changed, source / "model-9.safetensors")
    index = json.loads((source / INDEX).read_text())
    index["weight_map"]["more"] = "model-9.safetensors"
    (source / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match="twice, with different values"):
        hf.load(source)


@pytest.mark.parametrize(
    "options",
    [
        {"vocab_size": 131.0},
        {"n_layer": "2"},
        {"layer_norm_epsilon": "1e-5"},
        {"tie_word_embeddings": "no"},
    ],
    ids=str,
)
def test_options_of_another_type_are_refused_by_name(options, source):
    peer.rewrite_config(source, **options)
    (value,) = options.values()
    with pytest.raises(UserError, match=rf"model\..*={value!r} is not (a|True)"):
        hf.load(source)


def test_a_full_disk_ends_an_export_by_a_line_and_leaves_nothing(tmp_path, monkeypatch):
    def fill(*_, metadata):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("gpt2.hf.directory.save_file", fill)
    with pytest.raises(UserError, match=r"cannot be written .*No space left"):
        hf.save(tmp_path / "out", *make_model(257))
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_another_process_has_written_first_is_told_in_a_line(
    tmp_path, capsys
):
    folder = tmp_path / "out"
    with pytest.raises(SystemExit), exit_on_user_error(), new_directory(folder):
        folder.mkdir()
        (folder / "config.json").touch()
    assert capsys.readouterr().err == f"error: Directory not empty ({folder}).\n"


def test_options_that_contradict_each_other_are_told_with_their_file(source):
    path = source / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"n_head": 5}))
    told = rf"{path}: model\.num_heads=5 does not divide"
    with pytest.raises(UserError, match=told):
        hf.load(source)


@pytest.mark.parametrize("text", ["[" * 99_999, "5", "{"])
def test_a_config_that_is_no_object_is_told_in_a_line(text, source):
    for name in (INDEX, "config.json"):
        (source / name).write_text(text)
        with pytest.raises(UserError, match=r"cannot be read|model_type"):
            hf.load(source)
        (source / INDEX).unlink(missing_ok=True)


def cut_weights(source):
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def end_in_nan(source):
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"\xff" * 4)


def break_index(source):
    (source / INDEX).write_text('{"weight_map": {"a": 5}}')


def remove_shard(source):
    peer.rewrite(source, dict, shards=3)
    (source / "model-1.safetensors").unlink()


def shorten_tokenizer(source):
    save_tokenizer(source, peer.characters(100), 96)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_weights, "cannot be read"),
        (remove_shard, "model-1.safetensors cannot be read"),
        (break_index, "cannot be read"),
        (end_in_nan, "NaN"),
        (
            partial(peer.rewrite_config, n_embd=64),
            "wte.weight .*does not have the shape",
        ),
        (partial(peer.rewrite_config, n_layer=3), "h.2.ln_1.weight is missing"),
        (partial(peer.rewrite_config, n_layer=1), "have the tensors transformer.h.1"),
        (shorten_tokenizer, "no tokenizer"),
    ],
)
def test_a_damaged_directory_is_noticed_and_nothing_is_written(
    damage, message, source, tmp_path
):
    save_tokenizer(source, peer.characters(131), 96)
    hf.load(source)
    damage(source)
    with pytest.raises(UserError, match=message):
        import_run(source, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
