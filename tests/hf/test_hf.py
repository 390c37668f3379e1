"""Every family of Hugging Face's models, into this project and out of it."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import peer
import pytest

from configs.quickstart import get_config as get_quickstart
from gpt2 import hf
from gpt2.config import Config, with_options
from gpt2.data.tokenizer import build
from gpt2.errors import UserError
from gpt2.hf.config import read_config
from gpt2.hf.families import family_for
from gpt2.hf.family import canonical
from gpt2.hf.tokenizer_files import save_tokenizer
from gpt2.hf.weights import (
    export_run,
    import_run,
    load_initial_params,
    load_model,
    with_model_of_weights,
)
from gpt2.model import GPT
from gpt2.utils.scan import in_layout
from tests import numpy_model
from tests.helpers import (
    assert_rounded,
    configured,
    in_float64,
    random_params,
    thorough,
)
from tests.hf.families import LLAMA, NEOX

WEIGHTS = "model.safetensors"
BIG = pytest.param("124m", marks=pytest.mark.slow)
SCALED = "rope_scaling=llama3 rope_factor=8.0 rope_context=16"
# What these show, the others show too.
RARE = ("untied", "epsilon", "llama_multi_head", "gpt_neox")


def small_config(options=""):
    sizes = "vocab_size=67 context_length=32 num_layers=2 num_heads=4 embed_dim=32"
    return configured(f"{sizes} {options}", "model.").gpt()


def assert_golden(answers, name, atol):
    """Compare answers with PyTorch's answers in tests/golden."""
    golden = json.loads((peer.GOLDEN / f"{name}.json").read_text())
    assert abs(answers["loss"] - golden["loss"]) < 1e-5
    logits = answers["logits"][0, ::12]
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=atol)
    gradients = answers["gradients"]
    assert gradients.keys() == golden["gradients"].keys()
    for tensor, (norm, projection) in golden["gradients"].items():
        found = peer.probe(gradients[tensor])
        expected = pytest.approx([norm, projection], rel=0, abs=1e-4 * norm)
        assert found == expected, tensor
    assert answers["generated"] == golden["generated"]


@pytest.mark.parametrize(
    "name", [thorough(name) if name in RARE else name for name in peer.SMALL]
)
def test_imported_weights_give_the_golden_answers_of_pytorch(name, tmp_path):
    directory = peer.write_model(tmp_path, name)
    cfg, params = hf.load(directory)
    ids = peer.tokens(name)[0]
    _, atol = in_float64(lambda params: numpy_model.logits(cfg, params, ids), params)
    assert_golden(peer.our_answers(directory, name), name, 2 * atol)


@peer.needs_peers
@pytest.mark.parametrize("name", peer.SMALL)
def test_golden_answers_are_those_of_the_pytorch_that_is_installed(name, tmp_path):
    directory = peer.write_model(tmp_path, name)
    assert_golden(peer.torch_answers(directory, name), name, 1e-5)


@peer.needs_peers
@pytest.mark.parametrize("name", peer.SMALL)
def test_transformers_reads_an_export_and_what_it_saves_again_loads_the_same(
    name, tmp_path
):
    from transformers import AutoConfig, AutoModelForCausalLM

    source = peer.write_model(tmp_path / "source", name)
    hf.save(tmp_path / "copy", *hf.load(source))
    theirs = AutoConfig.from_pretrained(tmp_path / "source").to_dict()
    ours = AutoConfig.from_pretrained(tmp_path / "copy").to_dict()
    different = {name for name in ours if ours[name] != theirs.get(name)}
    # The dropout of GPT-2 is 0.1, and a missing width means four times that of the embedding.
    written = {"_name_or_path", "architectures", "dtype", "n_inner"}
    written |= {"embd_pdrop", "attn_pdrop", "resid_pdrop"}
    assert different <= written
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "copy", output_loading_info=True
    )
    assert not any(info.values())
    model.save_pretrained(tmp_path / "again")
    chex.assert_trees_all_equal(hf.load(tmp_path / "again"), hf.load(source))


def test_16_bit_weights_load_as_float32(tmp_path):
    directory = peer.write_model(tmp_path, "tied")
    _, params = hf.load(directory)

    def to_16_bits(tree):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)

    peer.rewrite(directory, to_16_bits)
    _, loaded = hf.load(directory)
    chex.assert_trees_all_equal_dtypes(loaded, params)
    expected = jax.tree.map(np.float32, to_16_bits(params))
    chex.assert_trees_all_equal(loaded, expected)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("gpt2", ""),
        ("gpt2", "norm_eps=1e-6 mlp_dim=50 activation=relu_squared num_kv_heads=4"),
        ("llama", f"{LLAMA} dropout=0.1 init=fan_in zero_init_projections=True"),
        ("llama", f"{LLAMA} num_kv_heads=1 mlp_dim=88 tie_embeddings=False head_dim=8"),
        (
            "llama",
            f"{LLAMA} num_kv_heads=2 rope_base=5e5 norm_eps=1e-6 activation=geglu",
        ),
        ("llama", f"{LLAMA} {SCALED}"),
        ("gpt_neox", f"{NEOX} {SCALED} rope_scaling=yarn"),
        ("qwen3", f"{LLAMA} qk_norm=True num_kv_heads=2 head_dim=24 mlp_dim=128"),
        ("gpt_neox", f"{NEOX} activation=gelu"),
        ("gpt_neox", f"{NEOX} tie_embeddings=True rope_base=2e4 rope_share=0.5"),
    ],
)
def test_switches_choose_the_family_and_export_then_import_gives_the_same_model(
    model_type, options, tmp_path
):
    cfg = small_config(options)
    params = random_params(cfg)
    scanned = dataclasses.replace(cfg, scan_layers=True)
    hf.save(tmp_path / "out", scanned, in_layout(params, scanned=True))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == model_type
    loaded_cfg, loaded = hf.load(tmp_path / "out")
    # A file does not record how the training began.
    start = dict(dropout=0.0, init="normal", zero_init_projections=False)
    assert loaded_cfg == dataclasses.replace(canonical(cfg), **start)
    chex.assert_trees_all_equal(loaded, params)


@pytest.mark.parametrize("options", ["", "position=rope parallel_block=True"])
def test_models_without_biases_export_the_same_function(options, tmp_path):
    cfg = small_config(f"{options} bias=False")
    params = random_params(cfg)
    ids = np.arange(8)
    hf.save(tmp_path / "out", cfg, params)
    loaded_cfg, loaded = hf.load(tmp_path / "out")
    assert loaded_cfg.bias

    def compute(params):
        return numpy_model.logits(cfg, params, ids)

    found = GPT(loaded_cfg).apply({"params": loaded}, ids[None])[0]
    assert_rounded(found, compute, params)


@pytest.mark.parametrize(
    ("options", "family", "option"),
    [
        (f"{LLAMA} qk_norm=True", "Qwen 3", "value_residual=True"),
        (LLAMA, "Llama", "activation=silu"),
        (NEOX, "GPT-NeoX", "num_kv_heads=2"),
        (NEOX, "GPT-NeoX", "head_dim=16"),
        (LLAMA, "Llama", "rope_share=0.5"),
        ("", "GPT-2", "logit_softcap=30.0"),
        (LLAMA, "Llama", "num_experts=4"),
    ],
)
def test_export_names_what_the_nearest_family_lacks(options, family, option, tmp_path):
    with pytest.raises(
        UserError, match=rf"{family}, the most similar.*model\.{option}"
    ):
        hf.save(tmp_path / "out", small_config(f"{options} {option}"), {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("tied", dict(scale_attn_weights=False), "scale_attn_weights=False"),
        ("llama", dict(rope_scaling=dict(rope_type="linear", factor=8.0)), "rope_type=linear"),
        ("llama", dict(rope_scaling=peer.LLAMA3 | dict(high_freq_factor=8)), "high_freq_factor=8"),
        ("qwen3", dict(rope_parameters=peer.YARN | dict(attention_factor=2)), "attention_factor=2"),
        ("qwen3", dict(use_sliding_window=True), "use_sliding_window=True"),
        ("qwen3", dict(layer_types=["full_attention", "sliding_attention"]), "layer_types="),
        ("llama", dict(rope_parameters={"partial_rotary_factor": 0.5}), "rotary_factor=0.5"),
        ("gpt_neox", dict(use_parallel_residual=False), "use_parallel_residual=False"),
        # What is absent has transformers' default.
        ("qwen3", dict(head_dim="absent"), r"not have the shape \(768, 48\)"),  # 6 heads of 128
        ("llama", dict(model_type="mistral"), "model_type=mistral is not one of"),
    ],
)  # fmt: skip
def test_what_a_family_computes_only_elsewhere_is_refused_by_name(
    name, changes, message, tmp_path
):
    peer.rewrite_config(peer.write_model(tmp_path, name), **changes)
    with pytest.raises(UserError, match=message):
        hf.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "new_names", "buffer"),
    [
        ("untied", {}, "h.0.attn.bias"),
        ("gpt_neox", {"embed_out.weight": "lm_head.weight"}, "layers.0.attention.bias"),
        ("llama", {}, "layers.0.self_attn.rotary_emb.inv_freq"),
    ],
)
def test_shards_names_of_other_versions_and_buffers_load_the_same(
    name, new_names, buffer, tmp_path
):
    directory = peer.write_model(tmp_path, name)
    expected = hf.load(directory)
    prefix = family_for(expected[0]).prefix

    def change(arrays):
        changed = {buffer: np.ones(3, np.float32)}
        for tensor, array in arrays.items():
            tensor = new_names.get(tensor, tensor)
            changed[tensor.removeprefix(prefix)] = array
        return changed

    peer.rewrite(directory, change, shards=3)
    assert not (directory / WEIGHTS).exists()
    chex.assert_trees_all_equal(hf.load(directory), expected)


def test_the_fraction_of_a_head_with_rope_is_read_from_every_version(tmp_path):
    directory = peer.write_model(tmp_path, "gpt_neox")
    assert read_config(directory).rope_share == 0.5
    peer.rewrite_config(directory, rotary_pct="absent")
    assert read_config(directory).rope_share == 0.25  # the default of transformers
    peer.rewrite_config(directory, rope_parameters={"partial_rotary_factor": 0.75})
    assert read_config(directory).rope_share == 0.75


@pytest.mark.parametrize("name", ["tied", *map(thorough, peer.SMALL[1:]), BIG])
def test_a_run_is_made_and_started_from_every_family(name, tmp_path):
    source = peer.write_model(tmp_path / "source", name)
    workdir = tmp_path / "run"
    copy = tmp_path / "copy"
    workdir.symlink_to(tmp_path / "another disk")
    save_tokenizer(source, peer.characters(peer.CONFIGS[name]["vocab_size"]), 96)
    with pytest.raises(UserError, match=r"run\[1\], because the path contains \["):
        import_run(source, tmp_path / "run[1]")
    import_run(source, workdir)
    cfg, params, tokenizer = load_model(workdir, None)
    _, expected = hf.load(source)
    chex.assert_trees_all_equal(params, expected)
    export_run(workdir, copy)
    assert read_config(copy) == read_config(source)
    assert (copy / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()
    with pytest.raises(UserError, match="already exists"):
        export_run(workdir, source)
    # The same sizes, named in another way, and another way to start.
    same = dataclasses.replace(
        cfg,
        num_kv_heads=cfg.kv_heads,
        head_dim=cfg.head_size,
        mlp_dim=cfg.hidden_dim,
        init="fan_in",
    )
    for path in (f"hf:{source}", f"run:{workdir}", f"run:{workdir}@0"):
        initial = load_initial_params(path, same, tokenizer)
        chex.assert_trees_all_equal(initial, params)


@pytest.fixture
def tied(tmp_path):
    """Return a directory with weights and a tokenizer, its config and the tokenizer."""
    peer.write_model(tmp_path, "tied")
    tokenizer = peer.characters(131)
    save_tokenizer(tmp_path, tokenizer, 96)
    return tmp_path, read_config(tmp_path), tokenizer


@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_run_starts_from_imported_weights_in_its_own_layout(scan_layers, tied):
    directory, cfg, tokenizer = tied
    _, params = hf.load(directory)
    shorter = dataclasses.replace(cfg, context_length=40, scan_layers=scan_layers)
    initial = load_initial_params(f"hf:{directory}", shorter, tokenizer)
    expected = in_layout(params, scanned=scan_layers)
    expected["wpe"] = {"embedding": params["wpe"]["embedding"][:40]}
    chex.assert_trees_all_equal(initial, expected)


def test_weights_of_another_model_or_tokenizer_are_refused(tied):
    directory, cfg, tokenizer = tied
    source = f"hf:{directory}"
    with pytest.raises(UserError, match=f"another tokenizer.*{directory}/tokenizer"):
        load_initial_params(source, cfg, peer.characters(131, first=101))
    (directory / WEIGHTS).unlink()  # options are compared before weights are read
    other = dataclasses.replace(
        cfg, num_layers=4, bias=False, context_length=128, dropout=0.1
    )
    with pytest.raises(UserError) as raised:
        load_initial_params(source, other, tokenizer)
    message = str(raised.value)
    for option in ("num_layers=2", "bias=True", "context_length=96"):
        assert f"model.{option}" in message
    assert "dropout" not in message


def test_a_run_has_the_model_of_its_weights_but_for_what_its_user_sets(tied, tmp_path):
    source, cfg, _ = tied
    workdir = tmp_path / "run"
    start = {"train.init_from": f"hf:{source}"}
    config = with_options(Config.from_dict(get_quickstart()), start)
    with pytest.raises(UserError, match="another tokenizer"):  # before it is trained
        with_model_of_weights(config, {}, workdir)
    start = {"data.tokenizer": str(source / "tokenizer.json")}
    config = with_options(config, start)
    chosen = {"model.context_length": 48, "model.dropout": 0.1}
    run = with_model_of_weights(with_options(config, chosen), chosen, workdir)
    run = run.with_vocabulary(131)
    expected = dataclasses.replace(cfg, context_length=48, dropout=0.1)
    assert dataclasses.replace(run.gpt(), scan_layers=expected.scan_layers) == expected
    other = {"model.num_layers": 5}
    with pytest.raises(UserError, match=r"model\.num_layers=2, not 5"):
        with_model_of_weights(with_options(config, other), other, workdir)
    # A run that continues does not need the weights.
    workdir.mkdir()
    (workdir / "config.json").write_text(json.dumps(run.to_dict()))
    (source / WEIGHTS).unlink()
    (source / "config.json").unlink()
    again = with_model_of_weights(config, chosen, workdir)
    assert again.model.num_layers == 2


def test_a_run_with_a_shorter_context_has_no_longer_window_than_its_context(tmp_path):
    usual = Config.from_dict(get_quickstart())
    options = {"model.window": 8, "model.window_pattern": "SL", "model.vocab_size": 320}
    source = tmp_path / "source"
    source.mkdir()
    trained = with_options(usual, options | {"model.context_length": 16})
    (source / "config.json").write_text(json.dumps(trained.to_dict()))
    build("byte").save(source / "tokenizer.json")
    chosen = {"model.context_length": 8, "model.mlp_dim": trained.model.hidden_dim}
    start = {"train.init_from": f"run:{source}", "data.tokenizer": "byte"}
    config = with_options(usual, start | chosen)
    run = with_model_of_weights(config, chosen, tmp_path / "run")
    assert (run.model.window, run.model.vocab_size) == (0, 320)
    for change in (
        {"data.tokenizer": "gpt2"},
        {"data.tokenizer": "char", "data.corpus": "text:other.txt"},
    ):
        other = with_options(config, change)
        with pytest.raises(UserError, match="another tokenizer"):  # before preparation
            with_model_of_weights(other, chosen, tmp_path / "run")
    # A tokenizer that is trained on the same text may be the same one.
    same = with_options(config, {"data.tokenizer": "char"})
    begun = with_model_of_weights(same, chosen, tmp_path / "run")
    assert (begun.model.window, begun.model.vocab_size) == (0, 320)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(run.to_dict()))
    again = with_model_of_weights(config, chosen, tmp_path / "run")
    assert again.model.vocab_size == 320


def test_a_run_of_longer_context_may_scale_rope_that_was_not(tmp_path):
    cfg = small_config(LLAMA)
    tokenizer = peer.characters(67)
    longer = small_config(f"{LLAMA} {SCALED} context_length=256")
    params = random_params(cfg)
    for name, model in (("plain", cfg), ("longer", longer)):
        hf.save(tmp_path / name, model, params, tokenizer)
        source = f"hf:{tmp_path / name}"
        loaded = load_initial_params(source, longer, tokenizer)
        chex.assert_trees_all_equal(loaded, params)
    with pytest.raises(
        UserError, match=r"model\.rope_context=16.*model\.rope_scaling=llama3"
    ):
        load_initial_params(source, cfg, tokenizer)
