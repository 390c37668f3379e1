"""Every switch of the model and the loss has an effect, the same one in every way to run a model.

A row of `SWITCHES` covers a switch. tests/model/test_against_numpy.py compares what each switch
computes with an independent reference.
"""

import collections
import dataclasses
import functools
import inspect
import random
import re
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2.config import Config, GPTConfig, with_options
from gpt2.config.options import OPTIONS, read_option
from gpt2.errors import UserError
from gpt2.model import GPT, KVCache, extend, ingredients, with_kernels
from gpt2.model.flops import count_compute_parameters, model_flops_per_token
from gpt2.model.ingredients import INGREDIENTS, score_term_options
from gpt2.training.losses import LOSS_TERMS, next_token_loss
from gpt2.training.program import Program
from gpt2.utils.scan import in_layout
from tests import numpy_model
from tests.helpers import (
    ROOT,
    batch_of,
    by_name,
    first_params,
    in_float64,
    options_of,
    random_params,
    thorough,
)

# One of 8 frequencies does not change, two are a little slower, and five are 8 times slower.
LLAMA3 = "model.rope_scaling=llama3 model.rope_factor=8.0 model.rope_context=64"
# By name, the options that differ from GPT-2.
SWITCHES = {
    "gelu": "model.activation=gelu",
    "relu": "model.activation=relu",
    "relu_squared": "model.activation=relu_squared",
    "silu": "model.activation=silu",
    "swiglu": "model.activation=swiglu",
    "geglu": "model.activation=geglu model.mlp_dim=80",
    "rmsnorm": "model.norm=rmsnorm",
    "norm_eps": "model.norm_eps=0.3",
    "post": "model.norm_position=post",
    "sandwich": "model.norm_position=sandwich",
    "rope": "model.position=rope",
    "rope_base": "model.position=rope model.rope_base=10.0",
    "rope_share": "model.position=rope model.rope_share=0.25",
    "llama3": f"model.position=rope {LLAMA3}",
    "yarn": """
        model.position=rope model.rope_scaling=yarn model.rope_factor=8.0
        model.rope_context=4096""",
    "alibi": "model.position=alibi",
    "none": "model.position=none",
    "grouped": "model.num_kv_heads=2",
    "grouped alibi": "model.num_kv_heads=2 model.position=alibi",
    "head_dim": "model.head_dim=24",
    "grouped head_dim": "model.head_dim=8 model.num_kv_heads=2",
    "qk_norm": "model.qk_norm=True",
    "window": "model.window=5",
    "window_pattern": "model.window=5 model.window_pattern=SL",
    "attention_softcap": "model.attention_softcap=0.5",
    "logit_softcap": "model.logit_softcap=0.5",
    "value_embeddings": "model.value_embeddings=True",
    "value_residual": "model.value_residual=True",
    "embedding_skip": "model.embedding_skip=True",
    "smear": "model.smear=True",
    "bigram_embeddings": "model.bigram_embeddings=96",
    "backout": "model.backout=True",
    "hyper_connections": "model.hyper_connections=3",
    "attention_gate": "model.attention_gate=True",
    "exclusive_attention": "model.exclusive_attention=True",
    "grouped exclusive": "model.num_kv_heads=2 model.exclusive_attention=True",
    "attention_sink": "model.attention_sink=True",
    "parallel_block": "model.parallel_block=True",
    "experts": "model.num_experts=4",
    "two experts": """
        model.num_experts=4 model.experts_per_token=2 model.expert_capacity=1.0
        model.expert_balance_loss=0.2 model.expert_z_loss=0.1""",
    "no bias": "model.bias=False",
    "untied": "model.tie_embeddings=False",
    "fan_in": "model.init=fan_in",
    "init_std": "model.init_std=0.1",
    "zero_init_projections": "model.zero_init_projections=True",
    "mup": "model.mup_base_width=16",
    "completep": "model.mup_base_depth=1",
    "z_loss": "loss.z_loss=0.1",
    "ahead": "loss.ahead=0.5,0.25 loss.ahead_fade=8",
}
# Common combinations.
COMBINED = {
    "llama": f"""
        model.position=rope model.norm=rmsnorm model.activation=swiglu
        model.num_kv_heads=2 model.bias=False model.tie_embeddings=False {LLAMA3}
        model.head_dim=24""",
    "mixtral": """
        model.position=rope model.norm=rmsnorm model.activation=swiglu
        model.num_kv_heads=2 model.bias=False model.tie_embeddings=False
        model.num_experts=4 model.experts_per_token=2 model.expert_capacity=1.0""",
    "gemma 2": """
        model.position=rope model.norm=rmsnorm model.activation=geglu
        model.norm_position=sandwich model.attention_softcap=5.0
        model.logit_softcap=3.0 model.window=5 model.window_pattern=SL
        model.num_kv_heads=2 model.bias=False""",
    "modded": """
        model.position=rope model.norm=rmsnorm model.activation=relu_squared
        model.value_embeddings=True model.value_residual=True model.qk_norm=True
        model.embedding_skip=True model.logit_softcap=15.0 model.bias=False
        model.window=6 model.window_pattern=SL model.parallel_block=True
        model.attention_gate=True model.smear=True model.backout=True
        model.exclusive_attention=True model.bigram_embeddings=96""",
}


def existing(text):
    """Return the options that exist, so that these tests pass if an ingredient is deleted."""
    options = {}
    for setting in text.split():
        name, _, value = setting.partition("=")
        if name not in OPTIONS:
            continue
        choices = OPTIONS[name].choices
        if not choices or value in choices:
            options[name] = read_option(name, value)
    return options


SWITCHES = {
    name: existing(text)
    for name, text in SWITCHES.items()
    if len(existing(text)) == len(text.split())
}
COMBINED = {name: existing(text) for name, text in COMBINED.items()}
ALL = SWITCHES | COMBINED
SMALL = existing("""
    model.vocab_size=64 model.context_length=16 model.num_layers=2 model.num_heads=4
    model.embed_dim=64 model.dropout=0.0 data.batch_size=16 optim.schedule=constant
    optim.learning_rate=1e-2 optim.end_fraction=1.0 optim.warmup_steps=0
    optim.eps=1e-4 train.num_steps=2""")
# Options that need no switch: sizes, and those that test_model.py and test_ops.py cover.
COVERED = {"vocab_size", "context_length", "num_layers", "num_heads", "embed_dim"}
COVERED |= {"dropout", "attention"}

each_switch = pytest.mark.parametrize("name", ALL)
# Switches whose test takes seconds run only in combination by default.
each_switch_by_itself = pytest.mark.parametrize(
    "name", [*COMBINED, *(thorough(name) for name in SWITCHES)]
)


@functools.cache
def config_of(name, changes=""):
    """Return the options of a small model with switches, joined by `+`, and further changes."""
    options = dict(SMALL)
    for part in name.split("+"):
        options |= ALL.get(part, {})
    return with_options(Config(), options | options_of(changes))


def groups(seed=None):
    """Join switches that can be combined, because to compile each by itself would take minutes."""
    names = [*SWITCHES]
    if seed is not None:
        random.Random(seed).shuffle(names)
    joined = []
    for name in names:
        fitting = [group for group in joined if can_join(group, name)]
        if fitting:
            smallest = min(fitting, key=len)
            smallest.append(name)
        else:
            joined.append([name])
    return ["+".join(group) for group in joined]


def can_join(group, name):
    """Return whether a switch and those of a group set different options that are compatible."""
    for other in group:
        if SWITCHES[other].keys() & SWITCHES[name].keys():
            return False
    try:
        config_of("+".join([*group, name])).gpt()
    except UserError:
        return False
    return True


each_group = pytest.mark.parametrize(
    "name",
    ["mixtral", *map(thorough, ["default", "llama", "gemma 2", "modded", *groups()])],
)


def tokens_of(seed, batch_size=2, length=16):
    return jax.random.randint(jax.random.key(seed), (batch_size, length), 0, 64)


def model_of(name):
    return GPT(config_of(name).gpt())


def params_of(name):
    return random_params(config_of(name).gpt())


def rolled(tokens):
    """Return a batch in which the first token of a row follows the last."""
    return {"tokens": tokens, "targets": jnp.roll(tokens, -1, axis=1)}


def mean_loss(name, model, params, tokens, key=None):
    """Return the mean objective in step 2, without the auxiliary losses of routers.

    With a `key` it is the objective of training, in which experts drop tokens.
    """
    loss = next_token_loss(model, config_of(name).loss)
    objective, sums = loss(params, rolled(tokens), key, jnp.int32(2))
    for path, (total, _) in sums.items():
        module, _, quantity = path.rpartition("/")
        if module:
            # 0 for what experts only report. If they are deleted, there is no such option.
            weight = getattr(model.config, f"expert_{quantity}", 0.0)
            objective -= weight * total
    _, count = sums["loss"]
    return objective / count


def in_numpy(name, params, tokens):
    """Return the logits `[B, T, V]` and the mean loss that tests/numpy_model.py computes."""
    exact = jax.tree.map(np.float64, params)
    cfg = model_of(name).config
    options = config_of(name).loss
    weights = [1.0, *numpy_model.ahead_weights(options, step=2)]
    logits = []
    loss = 0.0
    for row in np.asarray(tokens):
        row_logits = numpy_model.logits(cfg, exact, row)
        losses = numpy_model.losses_ahead(row_logits, np.roll(row, -1), options)
        loss += np.dot(losses, weights)
        logits.append(row_logits)
    return np.stack(logits), loss / tokens.size


def test_every_option_of_the_model_and_the_loss_has_a_switch():
    values = collections.defaultdict(set)
    for options in SWITCHES.values():
        for name, value in options.items():
            values[name].add(value)
    for name, option in OPTIONS.items():
        group, _, member = name.partition(".")
        if group not in ("model", "loss") or member in COVERED:
            continue
        assert values[name], name
        others = {*option.choices} - {option.default}
        assert values[name] >= others, name


@pytest.mark.parametrize("kind", [*INGREDIENTS, *LOSS_TERMS], ids=lambda k: k.__name__)
def test_an_ingredient_is_a_file_with_a_source_and_an_option(kind):
    path = Path(inspect.getfile(kind))
    if kind in LOSS_TERMS:
        folder = ROOT / "gpt2/training/losses"
        option = f"loss.{kind.option}"
    else:
        folder = ROOT / "gpt2/model/ingredients"
        option = f"model.{kind.option}"
    assert path.parent == folder
    # No other one has this name, and therefore this file.
    assert kind.__name__.lower() == path.stem.replace("_", "")
    if kind in INGREDIENTS:
        # ALiBi is one of several values of an option that GPT-2 also has.
        assert OPTIONS[option].is_ingredient != bool(OPTIONS[option].choices)
    source = r"\b(19|20)\d\d\b|arXiv|\d{4}\.\d{5}|modded-nanogpt|nanochat|GPT-J"
    assert re.search(source, inspect.getmodule(kind).__doc__)


@pytest.mark.parametrize(
    "name", [name for name, option in OPTIONS.items() if option.is_ingredient]
)
def test_the_option_of_a_deleted_ingredient_is_refused(monkeypatch, name):
    _, _, member = name.partition(".")
    others = tuple(kind for kind in INGREDIENTS if kind.option != member)
    monkeypatch.setattr(ingredients, "INGREDIENTS", others)
    collect = ingredients.ingredients_of.__wrapped__  # without its cache
    assert collect(GPTConfig()) == ()
    value = OPTIONS[name].kind(4)
    with pytest.raises(UserError, match=f"{name}={value} has no effect, because"):
        collect(GPTConfig(**{member: value}))


def steps_of(name, model, tokens):
    """Return the loss and the gradients of a model with the parameters of a switch."""
    step = jax.value_and_grad(lambda params: mean_loss(name, model, params, tokens))
    return jax.jit(step)(params_of(name))


@pytest.mark.parametrize("name", [*COMBINED, *map(thorough, groups())])
def test_kernels_give_the_loss_and_the_gradients_of_the_formulas(name):
    model = model_of(name)
    tokens = tokens_of(2)
    attention = "auto" if score_term_options(model.config) else "blocked"
    fast = GPT(dataclasses.replace(model.config, attention=attention))
    expected, gradients = steps_of(name, model, tokens)
    loss, fast_gradients = steps_of(name, with_kernels(fast), tokens)
    # About 20 sums in a row, each of 64 to 256 products, round like a random walk.
    rounding = 100 * np.finfo(np.float32).eps
    np.testing.assert_allclose(loss, expected, rtol=rounding)
    # The gradient of the same bias on all keys is 0 in theory, and the gradient of a weight of a
    # whole stream is a sum of thousands of numbers that cancel. Both round like larger numbers.
    gradients = by_name(gradients)
    sizes = {path: np.abs(gradient).max() for path, gradient in gradients.items()}
    largest = max(sizes.values())
    for path, gradient in by_name(fast_gradients).items():
        assert sizes[path] > 1e-7, path  # every parameter learns
        atol = rounding * (sizes[path] + 4e-2 * largest)
        difference = np.abs(gradient - gradients[path]).max()
        assert difference < atol, path


@each_switch
def test_a_switch_is_off_by_default_and_changes_the_loss_or_the_weights(name):
    for option, value in ALL[name].items():
        assert OPTIONS[option].default != value
    params = params_of(name)
    shapes = jax.tree.map(jnp.shape, params)
    if shapes != jax.tree.map(jnp.shape, params_of("default")):
        return
    _, loss = in_numpy(name, params, tokens_of(1))
    _, default_loss = in_numpy("default", params, tokens_of(1))
    if abs(loss - default_loss) > 5e-6:
        return
    drawn = by_name(first_params(model_of(name).config))
    default_drawn = by_name(first_params(model_of("default").config))
    changes = [drawn[path].std() - default_drawn[path].std() for path in drawn]
    assert np.abs(changes).max() > 1e-3


@each_group
def test_cached_logits_equal_uncached_ones(name):
    model = model_of(name)
    params = params_of(name)
    tokens = tokens_of(1)
    expected, atol = in_float64(lambda p: in_numpy(name, p, tokens)[0], params)
    scanned = GPT(dataclasses.replace(model.config, scan_layers=True))
    stacked = in_layout(params, scanned=True)

    append = jax.jit(extend, static_argnums=0)
    one_each = jnp.ones(2, jnp.int32)
    for form, weights in ((model, params), (scanned, stacked)):
        cache = KVCache.create(form.config, 2, 16)
        lengths = jnp.array([9, 7])  # longer than the windows
        logits, cache = append(form, weights, tokens[:, :9], lengths, cache)
        for _ in range(4):
            last = expected[np.arange(2), lengths - 1]
            np.testing.assert_allclose(logits, last, rtol=0, atol=atol)
            new = jnp.take_along_axis(tokens, lengths[:, None], axis=1)
            logits, cache = append(form, weights, new, one_each, cache)
            lengths += 1


def train(name, devices, changes=""):
    """Train two steps, and return the losses and the parameters, with layers unrolled."""
    program = Program.from_config(config_of(name, changes), devices)
    T = program.config.model.context_length
    state = program.init_state()
    rng = np.random.default_rng(0)
    step = None
    losses = []
    for _ in range(2):
        tokens = rng.integers(0, 64, (16, T + 1), np.int32)
        batch = batch_of(tokens)
        is_text = np.arange(T) < rng.integers(1, T + 1, (16, 1))
        batch["targets"] = np.where(is_text, batch["targets"], -1)
        batch = program.backend.put_batch(batch)
        step = step or program.compile_train(state, batch)
        state, metrics = step(state, batch)
        losses.append(float(metrics["train/loss"]))
    return losses, in_layout(jax.device_get(state.params), scanned=False)


LAYOUT = """
    parallel.data=2 parallel.fsdp=2 parallel.tensor=2 memory.remat=full
    memory.scan_layers=True train.accumulate_steps=2"""


@each_group
def test_eight_devices_scan_remat_and_accumulation_train_as_one_device_does(name):
    losses, params = train(name, jax.devices()[:1])
    layouts = [LAYOUT]
    if name == "modded":
        layouts.append("parallel.backend=pmap memory.remat=dots")
    for layout in layouts:
        other_losses, other_params = train(name, jax.devices(), layout)
        np.testing.assert_allclose(other_losses, losses, rtol=1e-5)
        # Each of the two updates is at most 100 times a small gradient: the learning rate over eps.
        rounding = 2 * 100 * np.finfo(np.float32).eps
        chex.assert_trees_all_close(other_params, params, atol=rounding)


@each_switch_by_itself
def test_flops_and_compute_parameters_are_those_of_the_program(name):
    sizes = "model.embed_dim=256 model.context_length=32 model.num_layers=3"
    if "model.mlp_dim" in ALL[name]:
        sizes += " model.mlp_dim=320"
    if "model.num_experts" in ALL[name]:
        sizes += " model.expert_capacity=1.0"
    cfg = config_of(name, f"{sizes} model.attention=plain").gpt()
    model = GPT(cfg)
    tokens = jax.ShapeDtypeStruct((8, 32), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    looked_up = {"wpe", "value_embedding", "bigram"}
    if not cfg.tie_embeddings:
        looked_up.add("wte")
    computing = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        modules = {key.key for key in path}
        if modules & looked_up:
            continue
        size = leaf.size
        if "experts" in modules:
            size *= cfg.experts_per_token / cfg.num_experts
        computing += size
    assert count_compute_parameters(cfg) == computing
    heads, size, _ = params["h_0"]["attn"]["c_proj"]["kernel"].shape
    seen = sum(window or cfg.context_length for window in cfg.windows)
    scores = 12 * heads * size * seen
    flops = 6 * computing + scores
    assert model_flops_per_token(cfg) == flops

    def loss(params, tokens):
        return mean_loss(name, model, params, tokens, jax.random.key(0))

    lowered = jax.jit(jax.value_and_grad(loss)).lower(params, tokens)
    expected = lowered.cost_analysis()["flops"]
    assert flops * tokens.size == pytest.approx(expected, rel=0.05)
