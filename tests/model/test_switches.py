"""Every switch of the model and the loss: it acts, and it holds in every way to run the model.

A switch is covered by naming it in `SWITCHES`. What each one computes, an independent reference
says in tests/model/test_switch_values.py.
"""

import contextlib
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

from configs import default
from gpt2.config import Config, with_options
from gpt2.config.options import OPTIONS, read_option
from gpt2.errors import UserError
from gpt2.model import GPT, KVCache, extend, with_kernels
from gpt2.model.flops import count_compute_parameters, model_flops_per_token
from gpt2.model.ingredients import INGREDIENTS, ingredients_of, score_term_options
from gpt2.training.losses import LOSS_TERMS, next_token_loss
from gpt2.training.program import Program
from gpt2.utils.scan import in_layout
from tests import plain
from tests.helpers import (
    ROOT,
    batch_of,
    in_float64,
    options_of,
    random_params,
    thorough,
)

# Of 8 frequencies one is kept, two are slowed a little, and five 8 times.
LLAMA3 = "model.rope_scaling=llama3 model.rope_factor=8.0 model.rope_context=64"
# Name -> the options that differ from GPT-2's.
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
    "z_loss": "loss.z_loss=0.1",
    "ahead": "loss.ahead=0.5,0.25 loss.ahead_fade=8",
}
# Together, as people combine them.
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
    """Those of the options that there are: who deletes an ingredient keeps these tests."""
    found = {}
    for setting in text.split():
        name, _, value = setting.partition("=")
        if name in OPTIONS and value in (OPTIONS[name].choices or [value]):
            found[name] = read_option(name, value)
    return found


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
# Options that give a size, or say how and not what to compute, or that others here set.
SIZES = {
    "vocab_size",
    "context_length",
    "num_layers",
    "num_heads",
    "embed_dim",
}
ELSEWHERE = {"dropout", "attention"}  # tests/model/test_model.py, tests/ops/test_ops.py

each_switch = pytest.mark.parametrize("name", ALL)
# Where each takes seconds, the default run has the combinations alone.
each_switch_by_itself = pytest.mark.parametrize(
    "name", [*COMBINED, *(thorough(name) for name in SWITCHES)]
)


@functools.cache
def config_of(name, changes=""):
    """The options of a small model with a switch, and changes of them."""
    options = dict(SMALL)
    for part in name.split("+"):
        options |= ALL.get(part, {})
    return with_options(Config(), options | options_of(changes))


def groups(seed=None):
    """Joins switches that go together: to compile each by itself would take minutes."""
    names = [*SWITCHES]
    found = []
    if seed is not None:
        random.Random(seed).shuffle(names)
    for name in names:
        for group in sorted(found, key=len):
            if not set(SWITCHES[name]) & {
                key for other in group for key in SWITCHES[other]
            }:
                with contextlib.suppress(UserError):
                    ingredients_of(config_of("+".join([*group, name])).gpt())
                    group.append(name)
                    break
        else:
            found.append([name])
    return ["+".join(group) for group in found]


each_group = pytest.mark.parametrize(
    "name",
    ["llama", *map(thorough, ["default", "mixtral", "gemma 2", "modded", *groups()])],
)


def tokens_of(seed, batch_size=2, length=16):
    return jax.random.randint(jax.random.key(seed), (batch_size, length), 0, 64)


def model_of(name):
    return GPT(config_of(name).gpt())


def params_of(name):
    return random_params(config_of(name).gpt())


def rolled(tokens):
    """A batch of all tokens, the first of which follow the last."""
    return {"tokens": tokens, "targets": jnp.roll(tokens, -1, axis=1)}


def mean_loss(name, model, params, tokens, key=None):
    """The mean objective in step 2, less what routers add to it (but not less its gradient).

    With a `key` it is that of training, in which experts drop tokens.
    """
    loss = next_token_loss(model, config_of(name).loss)
    objective, sums = loss(params, rolled(tokens), key, jnp.int32(2))
    weights = {
        "balance_loss": model.config.expert_balance_loss,
        "z_loss": model.config.expert_z_loss,
    }
    for path, (total, _) in sums.items():
        module, _, quantity = path.rpartition("/")
        if module and quantity in weights:
            objective -= weights[quantity] * total
    _, count = sums["loss"]
    return objective / count


def in_numpy(name, params, tokens):
    """Returns logits `[B, T, V]` and their mean loss as tests/plain.py computes them."""
    exact = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    rows = np.asarray(tokens)
    logits = np.stack([plain.logits(model_of(name).config, exact, row) for row in rows])
    options = config_of(name).loss
    each = zip(logits, np.roll(rows, -1, axis=1), strict=True)
    losses = [plain.losses_ahead(*row, options) for row in each]
    weights = [1.0, *plain.ahead_weights(options, step=2)]
    return logits, np.dot(np.sum(losses, axis=0), weights) / rows.size


def test_every_option_of_the_model_and_the_loss_has_a_switch():
    switched = {option for options in SWITCHES.values() for option in options}
    tree = default.get_config()
    for group in ("model", "loss"):
        for option in set(tree[group]) - SIZES - ELSEWHERE:
            assert f"{group}.{option}" in switched, option
    values = {
        (option, value)
        for options in SWITCHES.values()
        for option, value in options.items()
    }
    for option, stated in OPTIONS.items():
        if option.startswith("model.") and option != "model.attention":
            for choice in {*stated.choices} - {
                tree.model[option.removeprefix("model.")]
            }:
                assert (option, choice) in values, (option, choice)


@pytest.mark.parametrize("kind", [*INGREDIENTS, *LOSS_TERMS], ids=lambda k: k.__name__)
def test_an_ingredient_is_a_file_with_a_source_and_an_option_that_a_switch_covers(kind):
    path = Path(inspect.getfile(kind))
    group = "loss" if kind in LOSS_TERMS else "model"
    folder = "training/losses" if kind in LOSS_TERMS else "model/ingredients"
    assert path.parent == ROOT / "gpt2" / folder
    words = re.findall("[A-Z]+(?![a-z])|[A-Z][a-z]+", kind.__name__)
    assert "".join(words).lower() == path.stem.replace("_", "")
    assert (
        sum(inspect.getfile(each) == str(path) for each in INGREDIENTS + LOSS_TERMS)
        == 1
    )
    assert kind.option in default.get_config()[group]
    assert any(f"{group}.{kind.option}" in options for options in SWITCHES.values())
    source = r"\b(19|20)\d\d\b|arXiv|\d{4}\.\d{5}|modded-nanogpt|nanochat|GPT-J"
    assert re.search(source, inspect.getmodule(kind).__doc__)
    wanted = [name for name in SWITCHES if is_wanted(kind, name)]
    assert wanted and not is_wanted(kind, "default")
    assert all(f"{group}.{kind.option}" in SWITCHES[name] for name in wanted)


def is_wanted(kind, name):
    config = config_of(name)
    return kind.is_wanted(config.loss if kind in LOSS_TERMS else config.gpt())


def steps_of(name, model, tokens):
    """Returns the loss and the gradients of a model with the parameters of a switch."""
    step = jax.value_and_grad(lambda params: mean_loss(name, model, params, tokens))
    return jax.jit(step)(params_of(name))


@pytest.mark.parametrize("name", [*COMBINED, *map(thorough, groups())])
def test_kernels_give_the_loss_and_the_gradients_of_the_formulas(name):
    model = model_of(name)
    tokens = tokens_of(2)
    attention = "auto" if score_term_options(model.config) else "blocked"
    fast = GPT(dataclasses.replace(model.config, attention=attention))
    wanted, gradients = steps_of(name, model, tokens)
    found, others = steps_of(name, with_kernels(fast), tokens)
    # Sums of 64 to 256 products, some 20 of them one after another, round like a walk.
    rounding = 100 * np.finfo(np.float32).eps
    np.testing.assert_allclose(found, wanted, rtol=rounding)
    # The gradient of a bias on all keys alike is 0 in theory, and that of one weight of a whole
    # stream sums thousands of numbers that cancel: both round like larger ones.
    most = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradients))
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        other = functools.reduce(lambda tree, key: tree[key.key], path, others)
        atol = rounding * (float(jnp.abs(leaf).max()) + 4e-2 * most)
        np.testing.assert_allclose(
            other, leaf, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path)
        )


@each_switch
def test_a_switch_is_off_by_default_and_changes_the_loss_or_the_weights(name):
    tree = default.get_config()
    for option, value in ALL[name].items():
        group, _, member = option.partition(".")
        assert tree[group][member] != value
    params = params_of(name)
    tokens = tokens_of(1)
    if jax.tree.map(jnp.shape, params) != jax.tree.map(jnp.shape, params_of("default")):
        return
    losses = [in_numpy(n, params, tokens)[1] for n in (name, "default")]
    if abs(losses[0] - losses[1]) > 5e-6:
        return
    drawn = [
        jax.tree.leaves(jax.jit(model_of(n).init)(jax.random.key(0), tokens))
        for n in (name, "default")
    ]
    assert any(abs(a.std() - b.std()) > 1e-3 for a, b in zip(*drawn, strict=True))


@each_switch_by_itself
def test_no_logit_depends_on_a_later_token_and_every_parameter_gets_a_gradient(name):
    params = params_of(name)
    model = model_of(name)
    gradients = jax.jit(
        jax.grad(lambda params: mean_loss(name, model, params, tokens_of(3)))
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients(params)):
        assert jnp.abs(leaf).max() > 1e-7, jax.tree_util.keystr(path)
    # Every position looks up a row of its own, in all tables: rows 64 to 79.
    model = GPT(dataclasses.replace(model.config, vocab_size=80))
    wider = {"wte", "lm_head", "value_embedding"}

    def widen(path, leaf):
        return (
            jnp.tile(leaf, (2, 1))[:80] if wider & {key.key for key in path} else leaf
        )

    params = jax.tree_util.tree_map_with_path(widen, params)

    @jax.jit
    @jax.grad
    def gradient(params, position):
        # Of the 64 tokens that no position looks up: a tied head reads the other rows too.
        out = model.apply({"params": params}, 64 + jnp.arange(16)[None])[
            0, position, :64
        ]
        return jnp.sin(out).sum()

    for position in (0, 6, 14):
        for path, leaf in jax.tree_util.tree_leaves_with_path(
            gradient(params, position)
        ):
            if {"wte", "value_embedding"} & {key.key for key in path}:
                np.testing.assert_array_equal(leaf[64 + position + 1 :], 0.0)
                assert np.any(leaf[64 + position])


@each_group
def test_cached_logits_equal_uncached_ones(name):
    model = model_of(name)
    params = params_of(name)
    tokens = tokens_of(1)
    expected, atol = in_float64(lambda p: in_numpy(name, p, tokens)[0], params)
    scanned = GPT(dataclasses.replace(model.config, scan_layers=True))
    stacked = in_layout(params, scanned=True)

    append = jax.jit(extend, static_argnums=0)
    for form, weights in ((model, params), (scanned, stacked)):
        lengths = jnp.array([9, 7])  # beyond the windows
        logits, cache = append(
            form, weights, tokens[:, :9], lengths, KVCache.create(form.config, 2, 16)
        )
        for _ in range(4):
            wanted = expected[np.arange(2), lengths - 1]
            np.testing.assert_allclose(logits, wanted, rtol=0, atol=atol)
            new = jnp.take_along_axis(tokens, lengths[:, None], axis=1)
            logits, cache = append(form, weights, new, jnp.ones(2, jnp.int32), cache)
            lengths = lengths + 1


def train(name, devices, changes=""):
    """Trains two steps; returns the losses and the parameters, layers unrolled."""
    program = Program.from_config(config_of(name, changes), devices)
    T = program.config.model.context_length
    state = program.init_state()
    rng = np.random.default_rng(0)
    losses = []
    for _ in range(2):
        tokens = rng.integers(0, 64, (16, T + 1)).astype(np.int32)
        batch = batch_of(tokens)
        is_text = np.arange(T) < rng.integers(1, T + 1, (16, 1))
        batch["targets"] = np.where(is_text, batch["targets"], -1).astype(np.int32)
        batch = program.backend.put_batch(batch)
        if not losses:
            step = program.compile_train(state, batch)
        state, metrics = step(state, batch)
        losses.append(float(metrics["train/loss"]))
    return losses, in_layout(jax.device_get(state.params), scanned=False)


WAYS = """
    parallel.data=2 parallel.fsdp=2 parallel.tensor=2 memory.remat=full
    memory.scan_layers=True train.accumulate_steps=2"""


@each_group
def test_eight_devices_scan_remat_and_accumulation_train_as_one_device_does(name):
    losses, params = train(name, jax.devices()[:1])
    others = [WAYS]
    if name == "modded":
        others.append("parallel.backend=pmap memory.remat=dots")
    for changes in others:
        other_losses, other_params = train(name, jax.devices(), changes)
        np.testing.assert_allclose(other_losses, losses, rtol=1e-5)
        # Where gradients are small, an update is 100 of them (the rate over eps), in two steps.
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
    leaves = jax.tree_util.tree_leaves_with_path(params)
    looked_up = ["wpe", "value_embedding", "bigram"] + ["wte"] * (
        not cfg.tie_embeddings
    )
    of_experts = ALL[name].get("model.experts_per_token", 1) / 4
    computing = sum(
        leaf.size * (of_experts if jax.tree_util.DictKey("experts") in path else 1)
        for path, leaf in leaves
        if not any(key.key in looked_up for key in path)
    )
    assert count_compute_parameters(cfg) == computing
    heads, size, _ = params["h_0"]["attn"]["c_proj"]["kernel"].shape
    seen = sum(window or cfg.context_length for window in cfg.windows)
    scores = 12 * heads * size * seen
    assert model_flops_per_token(cfg) == 6 * computing + scores

    def loss(params, tokens):
        return mean_loss(name, model, params, tokens, jax.random.key(0))

    lowered = jax.jit(jax.value_and_grad(loss)).lower(params, tokens)
    flops = lowered.cost_analysis()["flops"]
    assert model_flops_per_token(cfg) * 8 * 32 == pytest.approx(flops, rel=0.05)
