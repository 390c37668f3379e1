"""Every family of Hugging Face's models, into this project and out of it."""

import dataclasses
import json

import chex
import jax
import numpy as np
import peer
import pytest

from gpt2 import hf
from gpt2.config import GPTConfig
from gpt2.data.tokenizer import ByteTokenizer, gpt2_tokenizer, train_bpe
from gpt2.errors import UserError
from gpt2.generate import Sampling, generate
from gpt2.hf.config import read_config
from gpt2.hf.families import family_for
from gpt2.hf.runs import export_run, import_run
from gpt2.hf.tensor_files import read_safetensors, write_safetensors
from gpt2.hf.tokenizer import save_tokenizer
from gpt2.model import GPT
from gpt2.utils.scan import stack_layers
from gpt2.weights import load_initial_params, load_model

BIG = pytest.param("124m", marks=pytest.mark.slow)
LLAMA = dict(norm="rmsnorm", position="rope", activation="swiglu", bias=False)
NEOX = dict(position="rope", parallel_block=True, tie_embeddings=False)


def rewrite_config(directory, **changes):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


def small_config(**options):
    size = dict(vocab_size=67, context_length=32, num_layers=2, num_heads=4, embed_dim=32)
    return GPTConfig(**(size | options))


def random_params(cfg):
    """Draws every parameter of a model: norms around 1, biases around 0."""
    shapes = jax.eval_shape(GPT(cfg).init, jax.random.key(0), np.zeros((1, 8), np.int32))
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        mean = 1.0 if path[-1].key == "scale" else 0.0
        return (mean + 0.2 * rng.standard_normal(leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes["params"])


# Forms of what the others show.
RARE = ("untied", "epsilon", "llama_multi_head", "qwen3")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.thorough if name in RARE else (),
        )
        for name in peer.SMALL
    ],
)
def test_imported_weights_give_the_golden_answers_of_pytorch(name, tmp_path):
    ours = peer.our_answers(peer.write_model(tmp_path, name), name)
    golden = json.loads((peer.GOLDEN / f"{name}.json").read_text())
    assert abs(ours["loss"] - golden["loss"]) < 1e-5
    np.testing.assert_allclose(ours["logits"][0, ::12], golden["logits"], atol=1e-4, rtol=0)
    assert ours["gradients"].keys() == golden["gradients"].keys()
    for tensor, (norm, projection) in golden["gradients"].items():
        our_norm, our_projection = peer.probe(ours["gradients"][tensor])
        assert abs(our_norm - norm) < 1e-4 * norm, tensor
        assert abs(our_projection - projection) < 1e-4 * norm, tensor
    assert ours["generated"] == golden["generated"]


@peer.needs_peers
@pytest.mark.parametrize("name", [*peer.SMALL, BIG])
def test_imported_weights_give_pytorchs_logits_gradients_and_tokens(name, tmp_path):
    directory = peer.write_model(tmp_path, name)
    ours, theirs = peer.our_answers(directory, name), peer.torch_answers(directory, name)
    np.testing.assert_allclose(ours["logits"], theirs["logits"], atol=1e-4, rtol=0)
    assert ours["gradients"].keys() == theirs["gradients"].keys()
    for tensor, gradient in theirs["gradients"].items():
        difference = np.abs(ours["gradients"][tensor] - gradient).max()
        assert difference < 1e-4 * np.abs(gradient).max(), tensor
    assert ours["generated"] == theirs["generated"]


@pytest.mark.parametrize("name", [*peer.SMALL, BIG])
def test_import_then_export_gives_back_every_bit(name, tmp_path):
    source = peer.write_model(tmp_path / "source", name)
    hf.save(tmp_path / "copy", *hf.load(source))
    original = read_safetensors(source / "model.safetensors")
    copied = read_safetensors(tmp_path / "copy" / "model.safetensors")
    assert original.keys() == copied.keys()
    for tensor, stored in original.items():
        np.testing.assert_array_equal(stored.read(), copied[tensor].read(), tensor)
    assert read_config(tmp_path / "copy") == read_config(source)


@peer.needs_peers
@pytest.mark.parametrize("name", peer.SMALL)
def test_transformers_reads_the_same_options_from_an_export(name, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    source = peer.write_model(tmp_path / "source", name)
    hf.save(tmp_path / "copy", *hf.load(source))
    theirs, ours = (
        AutoConfig.from_pretrained(tmp_path / place).to_dict() for place in ("source", "copy")
    )
    # GPT-2's own dropout is 0.1, and no width stands for four times the embedding's.
    written = {
        "_name_or_path",
        "architectures",
        "dtype",
        "n_inner",
        "embd_pdrop",
        "attn_pdrop",
        "resid_pdrop",
    }
    assert {k for k in ours if ours[k] != theirs.get(k)} <= written
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", output_loading_info=True)
    assert not any(info.values())


@peer.needs_peers
@pytest.mark.parametrize("name", peer.SMALL)
def test_what_transformers_saves_again_loads_the_same(name, tmp_path):
    from transformers import AutoModelForCausalLM

    source = peer.write_model(tmp_path / "source", name)
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(tmp_path / "again")
    chex.assert_trees_all_equal(hf.load(tmp_path / "again"), hf.load(source))


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("gpt2", {}),
        ("gpt2", dict(norm_eps=1e-6, mlp_dim=50, activation="relu_squared", num_kv_heads=4)),
        ("llama", LLAMA),
        ("llama", LLAMA | dict(num_kv_heads=1, mlp_dim=88, tie_embeddings=False)),
        ("llama", LLAMA | dict(num_kv_heads=2, rope_base=5e5, norm_eps=1e-6, activation="geglu")),
        ("qwen3", LLAMA | dict(qk_norm=True, num_kv_heads=2)),
        ("qwen3", LLAMA | dict(qk_norm=True, mlp_dim=128)),
        ("gpt_neox", NEOX | dict(activation="gelu")),
        ("gpt_neox", NEOX | dict(tie_embeddings=True, rope_base=2e4)),
    ],
)
@pytest.mark.parametrize("scan_layers", [False, True])
def test_switches_choose_the_family_and_export_then_import_gives_the_same_model(
    model_type, options, scan_layers, tmp_path
):
    cfg = small_config(**options)
    params = random_params(cfg)
    exported = dataclasses.replace(cfg, scan_layers=scan_layers)
    hf.save(tmp_path / "out", exported, stack_layers(params) if scan_layers else params)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == model_type
    loaded_cfg, loaded = hf.load(tmp_path / "out")
    assert loaded_cfg == cfg.canonical()
    chex.assert_trees_all_equal(loaded, params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (LLAMA | dict(bias=True), r"Llama, the nearest, has no option for model\.bias=True"),
        (LLAMA | dict(window=8), r"Llama, the nearest, has no option for model\.window=8"),
        (LLAMA | dict(norm_position="sandwich", logit_softcap=30.0),
         r"Llama.* for model\.norm_position=sandwich, model\.logit_softcap=30\.0"),
        (LLAMA | dict(qk_norm=True, value_residual=True),
         r"Qwen 3, the nearest, has no option for model\.value_residual=True"),
        (LLAMA | dict(activation="silu"), r"Llama.* for model\.activation=silu"),
        (NEOX | dict(num_kv_heads=2), r"GPT-NeoX.* no option for model\.num_kv_heads=2"),
        (NEOX | dict(norm="rmsnorm"), r"GPT-NeoX.* no option for model\.norm=rmsnorm"),
        (dict(mup_base_width=16), r"GPT-2.* no option for model\.mup_base_width=16"),
        (dict(num_kv_heads=1), r"GPT-2, the nearest, has no option for model\.num_kv_heads=1"),
    ],
)  # fmt: skip
def test_export_names_what_the_nearest_family_lacks(options, message, tmp_path):
    with pytest.raises(UserError, match=message) as raised:
        hf.save(tmp_path / "out", small_config(**options), {})
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_how_a_model_starts_does_not_keep_it_from_export():
    options = dict(dropout=0.1, init="xavier", zero_init_projections=True, attention="reference")
    assert family_for(small_config(**LLAMA, **options)).model_type == "llama"


LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", dict(rope_scaling=LLAMA3_ROPE), "rope_type=llama3 is not what Llama computes"),
        ("llama", dict(rope_scaling={"type": "linear", "factor": 2.0}), "rope_type=linear"),
        ("qwen3", dict(rope_parameters=LLAMA3_ROPE), "rope_type=llama3 is not what Qwen 3"),
        ("llama", dict(attention_bias=True), "attention_bias=True is not what Llama computes"),
        ("llama", dict(mlp_bias=True), "mlp_bias=True is not what Llama computes"),
        ("llama", dict(head_dim=16), r"head_dim=16 is not what Llama computes here \(8\)"),
        ("llama", dict(hidden_act="relu"), "hidden_act=relu is unknown here"),
        ("llama", dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5 is not"),
        ("qwen3", dict(use_sliding_window=True), "use_sliding_window=True is not"),
        ("qwen3", dict(layer_types=["full_attention", "sliding_attention"]), "layer_types="),
        ("gpt_neox", dict(rotary_pct=0.25), "rotary_pct=0.25 is not what GPT-NeoX computes"),
        ("gpt_neox", dict(rope_parameters={"partial_rotary_factor": 0.5}), "rotary_pct=0.5 is"),
        ("gpt_neox", dict(use_parallel_residual=False), "use_parallel_residual=False is not"),
        ("gpt_neox", dict(attention_bias=False), "attention_bias=False is not"),
        ("llama", dict(model_type="mistral"), "a mistral model. Give a directory of a GPT-2, Lla"),
        ("llama", dict(hidden_size=None), "is not a Llama config"),
        ("llama", dict(num_key_value_heads=1), r"k_proj.weight has shape \[16, 32\], and .* \[8"),
        ("llama", dict(rope_parameters=5), "is not a Llama config"),
    ],
)  # fmt: skip
def test_what_a_family_computes_only_elsewhere_is_refused_by_name(name, changes, message, tmp_path):
    rewrite_config(peer.write_model(tmp_path, name), **changes)
    with pytest.raises(UserError, match=message) as raised:
        hf.load(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("gpt_neox", "rotary_pct", "rotary_pct=0.25 is not"),  # what transformers takes without it
        ("qwen3", "head_dim", "head_dim=128 is not"),
        ("llama", "hidden_size", "is not a Llama config: KeyError"),
    ],
)
def test_an_option_that_is_left_out_has_transformers_default(name, option, message, tmp_path):
    file = peer.write_model(tmp_path, name) / "config.json"
    config = json.loads(file.read_text())
    del config[option]
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        read_config(tmp_path)


def test_names_of_other_versions_and_stored_buffers_load_the_same(tmp_path):
    for name, new_names, buffer in (
        ("gpt_neox", {"embed_out.weight": "lm_head.weight"}, "layers.0.attention.bias"),
        ("llama", {}, "layers.0.self_attn.rotary_emb.inv_freq"),
    ):
        directory = peer.write_model(tmp_path / name, name)
        expected = hf.load(directory)
        prefix = family_for(expected[0]).prefix
        stored = read_safetensors(directory / "model.safetensors")
        arrays = {
            new_names.get(k, k).removeprefix(prefix): tensor.read() for k, tensor in stored.items()
        }
        arrays[buffer] = np.ones(3, np.float32)
        shapes = {k: array.shape for k, array in arrays.items()}
        write_safetensors(directory / "model.safetensors", shapes, arrays.__getitem__)
        chex.assert_trees_all_equal(hf.load(directory), expected)


@pytest.mark.parametrize("name", peer.FAMILIES)
def test_a_run_is_made_and_started_from_every_family(name, tmp_path):
    source, run = peer.write_model(tmp_path / "source", name), tmp_path / "run"
    size = peer.CONFIGS[name]["vocab_size"]
    save_tokenizer(source, peer.characters(size), 96)
    import_run(source, run)
    cfg, params, tokenizer = load_model(run, None)
    chex.assert_trees_all_equal(params, hf.load(source)[1])
    export_run(run, tmp_path / "copy")
    weights = "model.safetensors"
    assert (tmp_path / "copy" / weights).read_bytes() == (source / weights).read_bytes()
    # The same sizes, named in another way, and another way to start.
    same = dataclasses.replace(
        cfg, num_kv_heads=cfg.kv_heads, mlp_dim=cfg.hidden_dim, mlp_ratio=4, init="xavier"
    )
    chex.assert_trees_all_equal(load_initial_params(f"hf:{source}", same, tokenizer), params)
    with pytest.raises(UserError, match=r"model\.rope_base=.*, not 123\.0"):
        other = dataclasses.replace(cfg, rope_base=123.0)
        load_initial_params(f"hf:{source}", other, tokenizer)


TOKENIZERS = {
    "gpt2": gpt2_tokenizer,
    "bpe": lambda: train_bpe(300, ["Hello there, world! A text of few words. " * 20]),
    "byte": ByteTokenizer,
}


@peer.needs_peers
@pytest.mark.parametrize(
    ("options", "tokenizer_name"),
    [
        *((LLAMA, name) for name in TOKENIZERS),
        (LLAMA | dict(qk_norm=True), "bpe"),
        (NEOX, "bpe"),
    ],
)
def test_a_pipeline_on_an_export_continues_text_as_this_project_does(
    options, tokenizer_name, tmp_path
):
    from transformers import AutoTokenizer, pipeline

    tokenizer = TOKENIZERS[tokenizer_name]()
    cfg = small_config(vocab_size=tokenizer.vocab_size, **options)
    params = random_params(cfg)
    hf.save(tmp_path / "out", cfg, params, tokenizer)
    text, count = "Hello there", 12
    prompt = tokenizer.encode(text).tolist()
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"] == prompt
    (ours,) = generate(
        params, cfg, [prompt], max_new_tokens=count, sampling=Sampling(0.0), eot=tokenizer.eot
    )
    generator = pipeline("text-generation", str(tmp_path / "out"))
    (answer,) = generator(text, max_new_tokens=count, do_sample=False, return_tensors=True)
    theirs = [token for token in answer["generated_token_ids"] if token != tokenizer.eot]
    assert theirs == prompt + ours
