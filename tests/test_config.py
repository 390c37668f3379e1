"""Options: every config builds, and every mistake is told in one line."""

import dataclasses
import importlib
import json
from pathlib import Path

import pytest

import configs.default
from gpt2.config import (
    CHOICES,
    DEFAULTS,
    Config,
    GPTConfig,
    differences,
    load_config,
    read_record,
)
from gpt2.errors import UserError
from gpt2.ops.activation import ACTIVATIONS, GATES
from gpt2.ops.attention import IMPLEMENTATIONS
from gpt2.optim import OPTIMIZERS, SCHEDULES
from gpt2.utils.remat import KEPT

CONFIGS = sorted(
    path.stem for path in Path(configs.default.__file__).parent.glob("*.py") if path.stem[0] != "_"
)

SHORT_RUN = {"train__num_steps": 9, "optim__warmup_steps": 0}


def build(**options):
    """The default config with dotted options changed, `a__b` for `a.b`."""
    tree = configs.default.get_config()
    for name, value in options.items():
        group, _, member = name.rpartition("__")
        (tree[group] if group else tree)[member] = value
    return Config.from_dict(tree)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_is_valid_and_survives_json(name):
    config = Config.from_dict(importlib.import_module(f"configs.{name}").get_config())
    assert Config.from_dict(config.to_dict()) == config


def test_a_group_by_itself_has_the_defaults_of_the_default_config():
    config = Config.from_dict(DEFAULTS)
    groups = [getattr(config, field.name) for field in dataclasses.fields(Config)]
    for group in filter(dataclasses.is_dataclass, groups):
        assert type(group)() == group
    assert dataclasses.replace(GPTConfig(), vocab_size=9) == config.with_vocabulary(9).gpt()


def test_defaults_cannot_be_changed_in_passing():
    with pytest.raises(AttributeError, match="immutable"):
        DEFAULTS.train.num_steps = 7


def test_every_choice_has_an_implementation_and_every_implementation_is_a_choice():
    implemented = {
        "model.activation": (*ACTIVATIONS, *GATES),
        "model.attention": ("auto", *IMPLEMENTATIONS),
        "optim.name": OPTIMIZERS,
        "optim.schedule": SCHEDULES,
        "memory.remat": ("none", *KEPT),
    }
    for name, names in implemented.items():
        assert set(CHOICES[name]) == set(names), name
    # The rest are told apart where they act: tests/test_switches.py, tests/test_optim.py and
    # tests/test_train_layouts.py train each of them.
    others = {
        "precision.compute",
        "precision.logits",
        "parallel.backend",
        "parallel.strategy",
        "parallel.fsdp_gather",
        "optim.cautious",
    }
    others |= {f"model.{name}" for name in ("norm", "norm_position", "position", "init")}
    assert set(CHOICES) == implemented.keys() | others


def test_a_gated_activation_is_known_by_its_name():
    gated = {
        name for name in CHOICES["model.activation"] if build(model__activation=name).model.is_gated
    }
    assert gated == set(GATES)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith("gpt2_")])
def test_the_gpt2_configs_have_openais_shapes(name):
    config = Config.from_dict(importlib.import_module(f"configs.{name}").get_config())
    released = GPTConfig.from_name(name.replace("_", "-"))
    for field in ("num_layers", "num_heads", "embed_dim", "context_length", "bias", "activation"):
        assert getattr(config.model, field) == getattr(released, field)


def test_the_choice_that_is_proposed_is_the_most_similar_or_the_first_of_those():
    with pytest.raises(UserError, match=r"use --config\.precision\.compute=float16\.$"):
        build(precision__compute="fp16")
    with pytest.raises(UserError, match=r"use gpt2-124m\.$"):
        GPTConfig.from_name("gpt2")


@pytest.mark.parametrize("name", ["shakespeare_char", "finetune_shakespeare"])
def test_the_shakespeare_configs_read_shakespeare(name):
    config = importlib.import_module(f"configs.{name}").get_config()
    assert config.data.corpus == "text:input.txt"


@pytest.mark.parametrize(
    ("name", "sequences", "alone"),
    [("gpt2_124m", 60, 8), ("gpt2_355m", 10, 48), ("gpt2_774m", 15, 32), ("gpt2_1558m", 8, 128)],
)
def test_the_gpt2_configs_give_eight_devices_or_one_as_many_sequences_as_they_say(
    name, sequences, alone
):
    module = importlib.import_module(f"configs.{name}")
    config = module.get_config()
    assert config.data.batch_size == 8 * config.train.accumulate_steps * sequences
    assert config.data.batch_size == alone * sequences
    assert f"{sequences} sequences" in module.__doc__
    assert f"accumulate_steps={alone}`" in module.__doc__


def test_the_124m_config_tells_what_devices_of_40_gb_take():
    module = importlib.import_module("configs.gpt2_124m")
    assert module.get_config().data.batch_size == 8 * 5 * 12 == 40 * 12
    assert "12 sequences" in module.__doc__
    assert "accumulate_steps=5` for eight, `=40` for one" in module.__doc__


def test_every_option_of_the_default_config_is_a_field_and_the_reverse():
    tree = configs.default.get_config().to_dict()
    assert build().to_dict().keys() == tree.keys()
    for group, members in tree.items():
        if isinstance(members, dict):
            assert build().to_dict()[group].keys() == members.keys()


def test_differences_names_what_changed():
    assert differences(build(), build(seed=3, model__bias=False)) == {
        "seed": (0, 3),
        "model.bias": (True, False),
    }


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (dict(remat="some"), "memory.remat=some is not one of none, full"),
        (dict(compute_dtype="int8"), "precision.compute=int8 is not one of float32"),
        (dict(param_dtype="int8"), "precision.params=int8 is not one of float32"),
        (dict(attention="flash"), "model.attention=flash is not one of auto"),
        (dict(vocab_size=0), "model.vocab_size=0 is below 1"),
    ],
)
def test_a_model_by_itself_is_validated_too(option, message):
    with pytest.raises(UserError, match=message):
        GPTConfig(**option)


def test_the_vocabulary_is_the_tokenizers_or_larger():
    assert build().with_vocabulary(257).model.vocab_size == 257
    assert build(model__vocab_size=300).with_vocabulary(257).model.vocab_size == 300
    assert build(model__vocab_size=300).with_vocabulary(0).model.vocab_size == 300
    with pytest.raises(UserError, match=r"model\.vocab_size=256 is less than the 257 tokens"):
        build(model__vocab_size=256).with_vocabulary(257)
    assert build(model__vocab_size=50304).with_vocabulary(257).model.vocab_size == 50304
    with pytest.raises(UserError, match=r"has 9949743 rows that none of the 50257 .*vocab_size=0"):
        build(model__vocab_size=10**7).with_vocabulary(50257)
    with pytest.raises(UserError, match="does not say how many tokens"):
        build().with_vocabulary(0)


def test_a_run_of_an_older_version_has_the_defaults_of_newer_options(tmp_path):
    tree = build(model__bias=False).to_dict()
    del tree["loss"], tree["optim"]["momentum"], tree["model"]["norm_eps"]
    (tmp_path / "config.json").write_text(json.dumps(tree))
    assert load_config(tmp_path) == build(model__bias=False)
    tree["memory"]["remat"] = "dots_no_batch"
    (tmp_path / "config.json").write_text(json.dumps(tree))
    assert load_config(tmp_path).memory.remat == "dots"
    tree["model"]["qk_norm"] = True
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(UserError, match=r"when model\.qk_norm had no learnt scale"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}", "does not hold the options of a run"),
        ("[1]", "does not hold the options of a run"),
        ("null", "does not hold the options of a run"),
        ('{"seed": 0', "is not valid JSON"),
        ("\xff", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"seed": 0, "model_type": "gpt2"}', "is a Hugging Face model's, not a run's"),
        ('{"seed": "zero"}', r"seed='zero' is not of type int"),
        ('{"seed": 0, "optim": []}', r"optim=\[\] is no group of options"),
        ('{"seed": 0, "model": {"bias": 1}}', r"model\.bias=1 is not of type bool"),
        ('{"seed": 0, "model": {"num_layer": 1}}', r"model\.num_layer.*model\.num_layers"),
        ('{"seed": 0, "update": {}}', r"no option update\. .*config\.json may be of a newer"),
    ],
    ids=range(12),
)
def test_a_file_that_is_no_record_of_a_run_is_named(tmp_path, text, told):
    path = tmp_path / "config.json"
    path.write_text(text, "latin-1")
    with pytest.raises(UserError, match=told) as error:
        read_record(path)
    assert "\n" not in str(error.value)


def test_what_a_record_holds_need_not_work_before_it_is_changed(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"seed": 0, "model": {"num_heads": 7}}')
    assert read_record(path)["model"]["num_heads"] == 7
    with pytest.raises(UserError, match=r"multiple of model\.num_heads=7"):
        load_config(tmp_path)


def test_a_run_that_ignored_another_default_is_read(tmp_path):
    """Runs kept one checkpoint once; without saves that was no mistake."""
    train = '{"checkpoint_every": 0, "eval_every": 0, "keep_checkpoints": 1}'
    (tmp_path / "config.json").write_text(f'{{"seed": 0, "train": {train}}}')
    assert load_config(tmp_path).train.keep_checkpoints == 2


def test_unknown_option_names_the_nearest():
    tree = configs.default.get_config().to_dict()
    tree["model"]["num_layer"] = tree["model"].pop("num_layers")
    with pytest.raises(UserError, match=r"no option model\.num_layer.*model\.num_layers"):
        Config.from_dict(tree)


def test_wrong_type_names_the_type():
    tree = configs.default.get_config().to_dict()
    tree["train"]["num_steps"] = "many"
    with pytest.raises(UserError, match=r"train\.num_steps='many' is not of type int"):
        Config.from_dict(tree)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model__num_heads": 7}, r"multiple of model\.num_heads=7.*num_heads=6"),
        ({"model__num_layers": 0}, r"model\.num_layers=0 is below 1\. For example, .*=12\."),
        ({"model__logit_softcap": 1e-30}, r"logit_softcap=1e-30 leaves all tokens alike"),
        ({"model__attention": "flash"}, r"attention=flash is not one of .*attention=auto\."),
        ({"parallel__fsdp": 0}, r"fsdp=0 is not a number .*--config\.parallel\.fsdp=1\."),
        (
            {"parallel__strategy": "ddp", "parallel__fsdp": 8},
            r"strategy=ddp would ignore parallel\.fsdp=8\. Use .*strategy=auto",
        ),
        (
            {"parallel__strategy": "zero3", "parallel__backend": "pmap"},
            r"pmap is data parallel only and would ignore parallel\.strategy=zero3",
        ),
        (
            {"parallel__strategy": "zero1", "parallel__fsdp_gather": "layer"},
            r"fsdp_gather=layer is ignored while no parameters are stored over parallel\.fsdp",
        ),
        (
            {"parallel__strategy": "megatron", "parallel__fsdp": -1},
            r"fsdp and parallel\.tensor are both -1.*use --config\.parallel\.tensor=2",
        ),
        (
            {"parallel__rules": {**DEFAULTS.parallel.rules, "mlp": "tensor,fsdp"}},
            r"rules\.mlp=tensor,fsdp is ignored while parallel\.fsdp=1\. Use .*mlp=tensor, or",
        ),
        (
            {"parallel__rules": {**DEFAULTS.parallel.rules, "embed": "fsp"}},
            r"parallel\.rules\.embed=fsp is not one of none, fsdp, .*rules\.embed=fsdp\.",
        ),
        ({"train__init_from": "run:"}, r"init_from=run: names no source .*Use hf:DIR"),
        ({"train__init_from": "run:x@"}, r"init_from=run:x@ names no source"),
        ({"model__dropout": 1.0}, r"model\.dropout=1\.0 is not in \[0, 1\)"),
        ({"model__activation": "gelo"}, r"activation=gelo is not one of.*activation=gelu"),
        ({"model__dropout": 0.1, "model__attention": "blocked"}, "keeps no attention weights"),
        (
            {"model__position": "rope", "model__embed_dim": 36},
            "rope needs an even head size, not 3",
        ),
        ({"model__num_kv_heads": 5}, r"multiple of model\.num_kv_heads=5.*num_kv_heads=4"),
        ({"model__rope_base": 5e5}, r"position=learned would ignore model\.rope_base=500000"),
        ({"model__rope_base": 0.0, "model__position": "rope"}, r"rope_base=0\.0 is not above 0"),
        ({"model__norm_eps": float("nan")}, r"model\.norm_eps=nan is not above 0"),
        (
            {"model__attention_softcap": float("inf")},
            r"attention_softcap=inf is not a finite number",
        ),
        (
            {"model__mlp_dim": 9, "model__mlp_ratio": 2},
            r"would ignore model\.mlp_ratio=2.*mlp_ratio=4",
        ),
        ({"model__window_pattern": "SL"}, r"window_pattern=SL is ignored while model\.window=0"),
        ({"model__window": 4, "model__window_pattern": "SX"}, "is not made of S"),
        ({"model__window": 4, "model__window_pattern": "L"}, "gives no layer the window"),
        ({"model__window": 4, "model__window_pattern": "S" * 13}, "more letters.*=SSSSSSSSSSSS"),
        ({"model__window": 1024}, r"window=1024 hides nothing of model\.context_length=1024"),
        (
            {"model__parallel_block": True, "model__norm_position": "post"},
            r"parallel_block has a single sum",
        ),
        ({"model__value_residual": True, "model__num_layers": 1}, "a model of one layer"),
        ({"model__mup_base_width": 256, "model__init": "xavier"}, r"ignore model\.init=xavier"),
        (
            {"model__position": "sinusoidal", "model__embed_dim": 9, "model__num_heads": 3},
            r"needs an even model\.embed_dim, not 9",
        ),
        ({"loss__z_loss": -1.0}, r"loss\.z_loss=-1\.0 is below 0"),
        ({"loss__label_smoothing": 1.0}, r"label_smoothing=1\.0 is not in \[0, 1\)"),
        ({"precision__compute": "float8"}, r"precision\.compute=float8 is not one of"),
        (
            {"precision__params": "bfloat16", "precision__compute": "bfloat16"},
            r"precision\.params=bfloat16 cannot hold",
        ),
        ({"data__val_fraction": 0.0}, "no validation text"),
        ({"data__val_fraction": 1.0}, "no training text"),
        ({"data__batch_size": 0}, r"data\.batch_size=0 is below 1"),
        ({"train__accumulate_steps": 7}, r"does not split into.*batch_size=476"),
        (
            {"train__keep_checkpoints": 5, "train__checkpoint_every": 0, "train__eval_every": 0},
            r"keep_checkpoints=5 is ignored .*Use --config\.train\.keep_checkpoints=2,",
        ),
        ({"train__keep_every": 1500}, r"no multiple of .*every=1000, .*keep_every=1000\."),
        (
            {"train__keep_every": 5, "train__checkpoint_every": 0},
            r"no multiple of .*every=0, .*keep_every=0\.",
        ),
        ({"optim__schedule": "constant"}, r"would ignore optim\.end_learning_rate"),
        ({"optim__end_learning_rate": 1.0}, r"is above optim\.learning_rate"),
        ({"train__init_from": "somewhere"}, "names no source of weights"),
        (
            {"train__init_from": "run:runs/first", "model__init_std": 0.1},
            r"draws no weights, and would ignore model\.init_std=0\.1",
        ),
        ({"parallel__data": 0}, "not a number of devices"),
        ({"parallel__fsdp": -1}, "only one axis can take the rest"),
        ({"parallel__backend": "pmap", "parallel__tensor": 2}, r"ignore parallel\.tensor=2"),
        ({"memory__remat": "some"}, r"memory\.remat=some is not one of"),
        ({"memory__scan_unroll": 0}, r"memory\.scan_unroll=0 is below 1"),
        (
            {"memory__scan_unroll": 12},
            r"scan_unroll=12 is ignored while memory\.scan_layers=False\. .*scan_layers=True",
        ),
        (
            {"memory__scan_layers": True, "memory__scan_unroll": 5},
            r"scan_unroll=5 does not divide model\.num_layers=12\. .*scan_unroll=4",
        ),
        (
            dict(memory__scan_layers=True, memory__scan_unroll=12, memory__remat="offload"),
            r"offload is known to free .*not memory\.scan_unroll=12\. .*scan_unroll=1",
        ),
        ({"seed": -1}, r"seed=-1 is below 0"),
        ({"seed": 2**32}, r"seed=4294967296 does not fit into 32 bits"),
        ({"train__num_steps": 2**31}, r"num_steps=2147483648 does not fit .*num_steps=600000"),
        ({"optim__eps": 1e-45}, r"eps=1e-45 is 0 in 32 bits\..*--config\.optim\.eps=1e-08"),
        ({"optim__weight_decay": 1e39}, r"weight_decay=1e\+39 is infinite in 32 bits"),
        ({"model__num_layers": 1001}, r"num_layers=1001 is above 1000\..*model\.num_layers=12"),
        (
            {"logging__profile_start": 9, "logging__profile_steps": 2, **SHORT_RUN},
            r"profile_start=9 is after the last.*at most --config\.logging\.profile_start=8",
        ),
        ({"logging__profile_start": 5}, r"ignored while logging\.profile_steps=0"),
        ({"logging__watch_every": -1}, r"logging\.watch_every=-1 is below 0"),
        ({"train__skip_bad_steps": -1}, r"train\.skip_bad_steps=-1 is below 0"),
        ({"train__skip_outliers": float("inf")}, r"train\.skip_outliers=inf is not a finite"),
        ({"train__hang_seconds": -1.0}, r"train\.hang_seconds=-1\.0 is below 0"),
    ],
)
def test_mistakes_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        build(**options)
