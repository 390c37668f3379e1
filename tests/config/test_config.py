"""Options: every config builds, each option is stated once, and what cannot work is refused."""

import dataclasses
import importlib
import json
from pathlib import Path

import pytest

import configs.default
from gpt2.config import DEFAULTS, Config, GPTConfig, OptimConfig, flatten
from gpt2.config.options import OPTIONS, Option, check_effects
from gpt2.config.run import read_options
from gpt2.errors import UserError
from gpt2.ops.plain import ACTIVATIONS
from gpt2.optim import OPTIMIZERS, SCHEDULES
from gpt2.optim.muon import POLYNOMIALS
from gpt2.parallel.kernels import PREFERRED
from gpt2.utils.remat import KEPT
from tests.helpers import configured

CONFIGS = sorted(
    path.stem
    for path in Path(configs.default.__file__).parent.glob("*.py")
    if path.stem[0] != "_"
)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_is_valid_and_survives_json(name):
    config = Config.from_dict(importlib.import_module(f"configs.{name}").get_config())
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_groups_have_the_fields_and_defaults_of_the_default_config():
    config = Config.from_dict(DEFAULTS)
    assert dataclasses.asdict(config) == DEFAULTS.to_dict()
    order = [name for name in flatten(config.to_dict()) if name.startswith("data.")]
    assert order[:2] == [
        "data.corpus",
        "data.tokenizer",
    ]  # as configs/default.py states them
    assert Config() == config and hash(Config()) == hash(config)
    for field in dataclasses.fields(Config):
        group = getattr(config, field.name)
        assert not dataclasses.is_dataclass(group) or type(group)() == group
    assert (
        dataclasses.replace(GPTConfig(), vocab_size=9)
        == config.with_vocabulary(9).gpt()
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.num_steps = 7


def test_options_know_what_concerns_them():
    for name, option in OPTIONS.items():
        assert option.help, name
        needed, _, values = option.needs.partition("=")
        if not needed:
            continue
        other = OPTIONS[needed]
        for value in filter(None, values.split("|")):
            assert value in (other.choices or str(other.default)), name
    may_change = {name for name, option in OPTIONS.items() if option.may_change}
    assert {"train.num_steps", "parallel.rules.mlp", "logging.screen"} <= may_change
    assert not {"seed", "optim.learning_rate", "data.batch_size"} & may_change
    may_differ = {name for name, option in OPTIONS.items() if option.may_differ}
    assert {"data.data_dir", "logging.screen"} <= may_differ
    # Every process takes part in these steps.
    assert not {"logging.watch_every", "train.eval_every"} & may_differ
    assert may_differ <= may_change
    not_recipe = {name for name, option in OPTIONS.items() if not option.is_recipe}
    assert not_recipe == {
        "seed",
        *(f"logging.{name}" for name in DEFAULTS.logging),
        "data.corpus",
        "data.tokenizer",
        "data.end_of_text",
        "data.data_dir",
        "data.unique",
        "data.val_fraction",
        "train.num_steps",
        "train.log_every",
        "train.eval_every",
        "train.eval_batches",
        "train.eval_tasks",
        "train.eval_tasks_every",
        "train.checkpoint_every",
        "train.keep_checkpoints",
        "train.keep_every",
        "train.hang_seconds",
        "train.init_from",
    }
    durations = {name for name, option in OPTIONS.items() if option.is_duration}
    assert durations == {
        "optim.warmup_steps",
        "optim.momentum_warmup",
        "loss.ahead_fade",
    }
    aliases = [alias for option in OPTIONS.values() for alias in option.aliases.split()]
    assert len(aliases) == len(set(aliases))


def test_every_choice_has_an_implementation_and_every_implementation_is_a_choice():
    implemented = {
        "model.activation": ACTIVATIONS,
        "model.attention": ("auto", "plain", "tokamax", *PREFERRED.values()),
        "optim.name": OPTIMIZERS,
        "optim.schedule": SCHEDULES,
        "optim.orthogonalize": POLYNOMIALS,
        "memory.remat": ("none", *KEPT),
    }
    for name, names in implemented.items():
        assert set(OPTIONS[name].choices) == set(names), name
    each = {name: configured(f"model.activation={name}") for name in ACTIVATIONS}
    gated = {name for name, config in each.items() if config.model.is_gated}
    assert gated == {"swiglu", "geglu"}


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith("gpt2_")])
def test_the_gpt2_configs_have_openais_shapes(name):
    config = Config.from_dict(importlib.import_module(f"configs.{name}").get_config())
    released = GPTConfig.from_name(name.replace("_", "-"))
    for field in (
        "num_layers",
        "num_heads",
        "embed_dim",
        "context_length",
        "bias",
        "activation",
    ):
        assert getattr(config.model, field) == getattr(released, field)


def test_the_vocabulary_is_the_tokenizers_or_larger():
    assert Config().with_vocabulary(257).model.vocab_size == 257
    larger = configured("model.vocab_size=300")
    assert larger.with_vocabulary(257) == larger.with_vocabulary(0) == larger
    with pytest.raises(UserError, match="less than the 257"):
        configured("model.vocab_size=256").with_vocabulary(257)
    with pytest.raises(UserError, match="vocab_size"):
        Config().with_vocabulary(0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}", "does not contain the options of a run"),
        ('{"seed": 0', "cannot be read"),
        ('{"seed": 0, "model_type": "gpt2"}', "no option model_type"),
        ('{"seed": 0, "model": {"bias": 1}}', r"model\.bias=1 is not True or False"),
    ],
    ids=range(4),
)
def test_a_file_that_is_no_record_of_a_run_is_named(tmp_path, text, told):
    path = tmp_path / "config.json"
    path.write_text(text, "latin-1")
    with pytest.raises(UserError, match=rf"config\.json.*{told}"):
        read_options(str(path))


# Options, and a word of the message.
WRONG = """
    seed=-1 | seed=-1
    train.num_steps=2147483648 | in [1, 2147483647]
    model.num_heads=7 | embed_dim
    model.activation=gelo | mean gelu
    model.position=rope model.embed_dim=36 | even
    model.position=rope model.rope_share=0.01 | even
    optim.name=schedule_free optim.schedule=constant optim.beta1=0.0 | optim.beta1
    optim.learning_rate=0.0 optim.adam_learning_rate=1e-3 | optim.learning_rate=0
    model.rope_base=5e5 model.rope_share=0.5 | rope_base
    model.position=rope model.rope_factor=2.0 | rope_scaling
    model.window=4 model.window_pattern=L | window
    model.window=1024 | window
    model.parallel_block=True model.norm_position=post | parallel_block
    model.expert_capacity=1.25 | num_experts
    model.mup_base_width=256 model.init=fan_in | init
    model.mup_base_width=256 model.num_experts=4 | num_experts
    model.mup_base_width=256 model.hyper_connections=2 | hyper_connections
    precision.logits=bfloat16 | logits=bfloat16
    data.val_fraction=1.0 | (0, 1)
    train.accumulate_steps=7 | accumulate_steps=7
    train.keep_every=1500 | keep_every
    train.keep_every=5 train.checkpoint_every=0 | keep_every
    train.init_from=somewhere | somewhere
    optim.name=sgd optim.beta1=0.8 | beta1
    optim.name=schedule_free optim.schedule=constant optim.cautious=updates | cautious
    optim.name=schedule_free | schedule
    optim.ema=0.9 optim.tail_average=0.2 | tail_average
    optim.name=sgd optim.scheduled_weight_decay=True | scheduled_weight_decay
    optim.hyperball=True model.zero_init_projections=True | zero_init_projections
    optim.decay_fraction=0.5 | wsd
    optim.schedule=piecewise:5=0.5,5=0.1 | piecewise
    optim.schedule=piecewise:5=0.5,x | piecewise
    optim.schedule=piecewise | Did you mean piecewise:?
    optim.schedule=piecewise: | contains no step
    optim.schedule=piecewise:4=-1 | -1 is neither
    optim.schedule=cosine:3=1 | Did you mean cosine?
    train.batch_schedule=9=64,5=32 | batch_schedule
    train.batch_schedule=9=7 train.accumulate_steps=2 | accumulate_steps
    train.context_schedule=9=300 | 300
    train.context_schedule=0=8,1=1024 train.batch_schedule=0=1 | 8 tokens
    train.window_schedule=9=2048 | window
    train.context_schedule=0=100 | 100
    train.window_schedule=9=64 train.num_steps=9 | contains step 9
    loss.ahead=1.2.3 | ahead
    loss.ahead=0.5,,0.25 | ahead
    loss.ahead=-0.5 | -0.5 is neither
    train.context_schedule=9=512 data.packing=bos | bos
    data.shuffle_documents=True data.packing=pad | data.packing=concat or bos
    optim.layer_rates=wte | layer_rates
    optim.layer_rates=h_(=1 | layer_rates
    optim.layer_rates=wte=1e-46 | 1e-46 is neither
    optim.learning_rate=nan | learning_rate=nan
    optim.beta1=1.0 | [0, 1)
    model.norm_eps=0.0 | (0, inf)
    data.val_fraction=0.0 | (0, 1)
    optim.end_fraction=1.5 | [0, 1]
    loss.ahead_fade=10 | loss.ahead
    parallel.fsdp=-2 | [-1, inf)
    model.num_layers=0 | [1, 10000]
    parallel.strategy=ddp parallel.fsdp=8 | ddp
    parallel.strategy=zero3 parallel.backend=pmap | pmap
    parallel.rules.embed=fsp | fsp
"""
WRONG = [line.strip().split(" | ") for line in WRONG.strip().splitlines()]


@pytest.mark.parametrize(
    ("options", "word"), WRONG, ids=[options for options, _ in WRONG]
)
def test_options_that_cannot_work_or_would_mislead_are_refused(options, word):
    with pytest.raises(UserError) as error:
        configured(options)
    assert word in str(error.value) and "\n" not in str(error.value)


def test_factors_that_a_run_can_mean_are_read():
    optim = OptimConfig(
        schedule="piecewise:5=0,6=2.5e-1", layer_rates="wte=0,h_(0|1)/.*=1e3"
    )
    assert optim.pieces == ((5, 0.0), (6, 0.25))
    assert optim.rates == (("wte", 0.0), ("h_(0|1)/.*", 1000.0))


def test_ranges_and_names_are_those_of_the_fields_types():
    assert OPTIONS["seed"].kind is int
    assert OPTIONS["seed"].interval == "[0, 4294967295]"
    assert OPTIONS["model.norm"].kind is str
    assert OPTIONS["model.norm"].choices == ("layernorm", "rmsnorm")
    assert OPTIONS["parallel.rules.mlp"].choices[-1] == "tensor,fsdp"
    assert OPTIONS["train.hang_seconds"].interval == "[0, inf)"
    for interval, held in (
        ("[0, 1)", [True, True, False]),
        ("(0, 1]", [False, True, True]),
        ("[0, inf)", [True, True, True]),
    ):
        option = Option(kind=float, interval=interval)
        assert [option.holds(number) for number in (0.0, 0.5, 1.0)] == held
        assert not any(map(option.holds, (float("nan"), float("inf"), -1.0)))


def test_sizes_are_computed_before_the_model_is_traced():
    config = GPTConfig.from_name("gpt2-124m", activation="swiglu", num_kv_heads=4)
    computed = {"head_size", "kv_heads", "hidden_dim", "windows", "loops_over_layers"}
    assert computed <= vars(config).keys()
    assert (config.head_size, config.kv_heads, config.is_gated) == (64, 4, True)
    changed = dataclasses.replace(config, num_heads=24)
    assert changed.head_size == 32 and changed != config
    with pytest.raises(UserError, match=r"model\.dropout=2\.0 is not in"):
        dataclasses.replace(config, dropout=2.0)


def test_what_is_derived_from_options():
    assert OptimConfig(schedule="wsd", decay_fraction=0.29).decay_steps(100) == 29
    assert OptimConfig(learning_rate=6e-3).end_rate == pytest.approx(6e-4)
    config = configured("model.window=4 model.window_pattern=SL")
    assert config.model.windows[:3] == (4, 0, 4)
    # A schedule may begin or end with all layers seeing all.
    for schedule in ("0=4,9=0", "9=4"):
        config = configured(f"""
            model.window_pattern=SL train.window_schedule={schedule}
            model.vocab_size=9""")
        last = config.shapes.last.window
        assert config.gpt().windows[:3] == (last, 0, last)


def test_an_option_may_need_a_choice_whatever_argument_follows_it():
    needs = "schedule=piecewise"
    options = {
        "schedule": Option(kind=str),
        "rate": Option(kind=float, default=0.0, needs=needs),
    }
    check_effects({"schedule": "piecewise:10=0.5", "rate": 0.5}, options)
    with pytest.raises(UserError, match="has no effect with schedule=cosine"):
        check_effects({"schedule": "cosine", "rate": 0.5}, options)
